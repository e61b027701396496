"""Plan of a strategy's scale vectors, made before the model is changed."""

from collections.abc import Callable, Iterator
from itertools import chain, repeat

import torch
from torch import Tensor, nn

from lightning_sv.errors import ConfigError
from lightning_sv.interop.apply.sites import Site, SiteMatrix
from lightning_sv.interop.apply.weights import OutputNorm, ScaledGamma, ScaledPart, ScaledWeight
from lightning_sv.scale import DirectScale, OffsetScale, ScaleOptions, ScaleStrategy, ScaleVector
from lightning_sv.scale.norm import upcast
from lightning_sv.scale.strategy import PLACEMENTS, Placement
from lightning_sv.scale.vector import HeadShared, Role

#: one vector for all matrices behind a norm: the vector itself for the first matrix, a function for the others
SharedVector = Iterator[ScaleVector | Callable[[], Tensor]]


class Plan:
    """Planned changes of a model for a strategy, site by site.

    Args:
        model: model whose parameters are read
        strategy: the strategy
        options: `placement_at`, `role_at` and `share_heads`, by the last part of a matrix's name
        sites: sites of the model

    Attributes:
        weights: matrix -> its parametrization
        gammas: stored scale vector -> its parametrization
        outputs: path of a linear layer -> the norm of its output
        values: parameter -> its new values
        frozen: parameters to freeze
        notes: (name, deviation from the strategy and its reason)

    Raises:
        ConfigError: the model cannot have this strategy; the message names the parameter
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module, strategy: ScaleStrategy, options: ScaleOptions, sites: list[Site]):
        self.model, self.strategy, self.options, self.row = model, strategy, options, strategy.placement_row
        self.named = dict(model.named_parameters())
        self.eps = float(getattr(getattr(model, "config", None), "rms_norm_eps", None) or 1e-5)
        self.weights: dict[str, ScaledWeight] = {}
        self.gammas: dict[str, ScaledGamma] = {}
        self.outputs: dict[str, OutputNorm] = {}
        self.values: dict[str, Tensor] = {}
        self.frozen: set[str] = set()
        self.notes: list[tuple[str, str]] = []
        self._check_options(sites)
        for site in sites:
            if site.origin not in (0.0, 1.0):
                self._note(site.vector, "unchanged, because its norm multiplies by neither w nor 1 + w")
                continue
            self._note_matrices(site)
            (self._site if site.vector else self._bare_site)(site)

    def _check_options(self, sites: list[Site]) -> None:
        names = {matrix.word for site in sites for matrix in site.matrices}
        keys = dict.fromkeys(self.options.placement_at, "placement_at")
        keys |= dict.fromkeys(self.options.share_heads, "share_heads")
        keys |= {key.rpartition(".")[0]: "role_at" for key in self.options.role_at}
        for key, name in keys.items():
            if key not in names:
                raise ConfigError(
                    f"options.{name} names {key!r}; expected a matrix that reads a scale vector of this model: "
                    f"{' '.join(sorted(names)) or 'none'}."
                )
        for key, token in self.options.placement_at.items():
            if token not in PLACEMENTS:
                raise ConfigError(f"options.placement_at.{key} is {token!r}; expected one of {' '.join(PLACEMENTS)}.")
        for name in ("share_scale_out", "freeze_input_beta"):
            if getattr(self.options, name):
                raise ConfigError(
                    f"options.{name} is not supported by apply_strategy; it needs a Backbone built with the strategy."
                )

    def _note_matrices(self, site: Site) -> None:
        """Note which matrices have no vectors of their own, and why."""
        lacks = "no vector after it" if site.vector else "no own vector"
        if self.row.scale_out or (self.row.scale_in and not site.vector):
            for name in site.tied:
                self._note(name, f"{lacks}, because it is tied; untie_head=True unties a head")
            for name in site.unfit:
                self._note(name, f"{lacks}, because it also reads other values, or is not a plain matrix")
        for matrix in site.matrices:
            if matrix.mixed and self.strategy.per_branch:
                self._note(
                    matrix.weight, "contains several interleaved matrices that share their vectors: hg is partial"
                )

    def _bare_site(self, site: Site) -> None:
        """Add vectors of ones to the matrices behind a norm without scale vector: one each, or one for all."""
        ones: dict[SiteMatrix, Tensor] = {}
        for matrix in site.matrices:
            weight = self.named[matrix.weight]
            if self._placement(matrix).scale_in:
                ones[matrix] = upcast(weight).new_ones(weight.shape[matrix.in_axis])
        shared: SharedVector | None = None
        if ones and not self.strategy.per_branch:
            weights = sorted((self.named[matrix.weight] for matrix in ones), key=lambda w: not w.requires_grad)
            vector = self._vector(site.vector, next(iter(ones.values())), "input", weights[0])
            shared = chain([vector], repeat(vector.forward))  # stored in the first matrix
        for matrix in site.matrices:
            self._branch(matrix, ones.get(matrix), before=matrix in ones, shared=shared)

    def _site(self, site: Site) -> None:
        """Move the site's vector to its matrices, if the strategy asks for it and they can take it; or keep it."""
        stored = self.named[site.vector]
        gamma = upcast(stored) + (site.origin or 0.0)
        moves = self.strategy.per_branch or self.row.scale_out or not self.row.scale_in
        if site.role == "input" and moves and site.stays and not site.matrices and not site.tied:
            self._note(site.vector, f"remains one vector of its norm: {site.stays}")
        has_in = {matrix: self._placement(matrix).scale_in for matrix in site.matrices}
        branches = sum(len(matrix.parts) for matrix in site.matrices)
        if not site.matrices or (all(has_in.values()) and (branches == 1 or not self.strategy.per_branch)):
            self._keep(site, stored, gamma)
        elif not any(has_in.values()) and site.stays:
            self.frozen.add(site.vector)
            self._note(site.vector, f"constant, and not folded into the matrices: {site.stays}")
        elif site.stays:
            if not all(has_in.values()):
                raise ConfigError(
                    f"options.placement_at cannot move {site.vector} to only some of its matrices: {site.stays}."
                )
            self._keep(site, stored, gamma)
            self._note(site.vector, f"shared by all branches, without heterogeneity: {site.stays}")
        elif any(has_in.values()) and not self.strategy.per_branch:
            raise ConfigError(
                f"options.placement_at gives only some branches of {site.vector} an input-side scale vector, but the "
                "strategy shares one between them; add 'hg' to the strategy."
            )
        else:
            self._neutral(site, stored, gamma)
            for matrix in site.matrices:
                self._branch(matrix, gamma, before=has_in[matrix], norm=site.vector)
            return
        for matrix in site.matrices:
            self._branch(matrix, None, before=False)

    def _placement(self, matrix: SiteMatrix) -> Placement:
        token = self.options.placement_at.get(matrix.word)
        return self.row if token is None else PLACEMENTS[token]

    def _keep(self, site: Site, stored: Tensor, gamma: Tensor) -> None:
        """Keep gamma in its norm, in the strategy's parameterization."""
        kind = self.strategy.vector
        if kind is (OffsetScale if site.origin else DirectScale):
            return
        if site.matrices and not site.stays and (signs := self._signed(gamma)) is not None:
            gamma = gamma.abs()
            for matrix in site.matrices:
                self.values[matrix.weight] = self._columns(matrix, signs)
            if site.bias is not None:
                self.values[site.bias] = self.named[site.bias] * signs
        role: Role = "input" if site.role == "input" else "output"
        self.gammas[site.vector] = ScaledGamma(self._vector(site.vector, gamma, role, stored), site.origin or 0.0)
        self.frozen.add(site.vector)

    def _signed(self, gamma: Tensor) -> Tensor | None:
        """Return the signs of gamma if the parameterization cannot represent them."""
        if (gamma >= 0).all() or (gamma == 0).any():
            return None
        try:
            self.strategy.vector(gamma.shape[-1], "input").set_gamma(gamma.cpu())
        except ValueError:
            return gamma.sign()
        return None

    def _neutral(self, site: Site, stored: Tensor, gamma: Tensor) -> None:
        """Set the norm's gamma to 1; its bias is divided by gamma, because the vectors behind it multiply it."""
        self.values[site.vector] = torch.full_like(stored, 1 - (site.origin or 0.0))
        self.frozen.add(site.vector)
        if site.bias is not None:
            bias = self.named[site.bias]
            if ((gamma == 0) & (bias != 0)).any():
                raise ConfigError(
                    f"{site.vector} has an entry 0 where {site.bias} has none, which vectors behind the norm cannot "
                    "represent. Use a strategy without hg and ap."
                )
            self.values[site.bias] = torch.where(gamma == 0, bias, bias / gamma).to(bias.dtype)

    def _branch(
        self, matrix: SiteMatrix, gamma: Tensor | None, before: bool, norm: str = "", shared: SharedVector | None = None
    ) -> None:
        """Add vectors to a matrix; `gamma` was removed from its norm, whose parameter is `norm`."""
        placement, weight = self._placement(matrix), self.named[matrix.weight]
        if placement.norm_out and not matrix.router and not matrix.normalized:
            self._output_norm(matrix, weight)
        after = placement.scale_out and not (placement.norm_out and not matrix.router)
        if gamma is not None and not before:
            self.values[matrix.weight] = self._columns(matrix, gamma)
        if gamma is not None and before and (signs := self._signed(gamma)) is not None:
            self.values[matrix.weight] = self._columns(matrix, signs)
            gamma = gamma.abs()
        before = before and gamma is not None
        source = norm or matrix.weight
        if not (before or after):
            return
        batch_dims = weight.shape[:-2]
        parts = []
        for width in matrix.parts:
            scale_in: ScaleVector | Callable[[], Tensor] | None = None
            scale_out: ScaleVector | None = None
            if before and shared is not None:
                scale_in = next(shared)
            elif before and gamma is not None:
                wide = gamma.expand(*batch_dims, -1)
                scale_in = self._vector(source, wide, self._role(matrix, "scale_in", "input"), self.named[source])
            if after:
                ones = upcast(weight if gamma is None else gamma).new_ones(*batch_dims, width)
                scale_out = self._vector(matrix.weight, ones, self._role(matrix, "scale_out", "output"), weight)
            parts.append(ScaledPart(scale_in, scale_out))
        self.weights[matrix.weight] = ScaledWeight(parts, matrix.parts, matrix.in_axis != weight.ndim - 1)

    def _output_norm(self, matrix: SiteMatrix, weight: Tensor) -> None:
        path = matrix.weight.rpartition(".")[0]
        layer = self.model.get_submodule(path)
        several = matrix.mixed or len(matrix.parts) > 1
        if type(layer) is not nn.Linear or several or weight.ndim != 2:
            why = "it holds several matrices" if several or weight.ndim != 2 else f"a {type(layer).__name__} owns it"
            raise ConfigError(
                f"dnp normalizes outputs of plain nn.Linear layers only, but for {matrix.weight} {why}. Use dp, or "
                f"options.placement_at {{{matrix.word}: dp}}."
            )
        d_out = weight.shape[0]
        width = matrix.head_width or d_out
        role, ones = self._role(matrix, "scale_out", "output"), upcast(weight).new_ones(d_out)
        if matrix.word in self.options.share_heads:
            scale: ScaleVector = HeadShared(self._vector(matrix.weight, ones[:width], role, weight), d_out // width)
        else:
            scale = self._vector(matrix.weight, ones, role, weight)
        self.outputs[path] = OutputNorm(scale, width, self.eps)

    def _role(self, matrix: SiteMatrix, side: str, role: Role) -> Role:
        requested = self.options.role_at.get(f"{matrix.word}.{side}", role)
        return "input" if requested == "input" else "output"

    def _columns(self, matrix: SiteMatrix, gamma: Tensor) -> Tensor:
        """Return W diag(gamma), with the value of W planned so far."""
        weight = self.values.get(matrix.weight, self.named[matrix.weight])
        factor = gamma if matrix.in_axis == weight.ndim - 1 else gamma.unsqueeze(-1)
        return (weight * factor).to(weight.dtype)

    def _vector(self, name: str, gamma: Tensor, role: Role, like: Tensor) -> ScaleVector:
        """Return a vector with this gamma, on the device of `like` and frozen if `like` is."""
        vector = self.strategy.vector(gamma.shape[-1], role, gamma.shape[:-1])
        vector.to(device=like.device, dtype=gamma.dtype)
        try:
            vector.set_gamma(gamma)
        except ValueError as error:
            why = f"{name} under {str(self.strategy)!r}: {error}"
            if not gamma.any():
                start = float(self.named[name].flatten()[0]) + 1e-3
                why += f" Or initialize it near 0: torch.nn.init.constant_(model.get_parameter({name!r}), {start:g})."
            raise ConfigError(why) from error
        return vector.requires_grad_(like.requires_grad)

    def _note(self, name: str, what: str) -> None:
        self.notes.append((name, what))
