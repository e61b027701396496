"""Changes of a model for a strategy, per site; closing a stack undoes them."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lightning_sv.errors import ConfigError, expect
from lightning_sv.interop.apply.applied import (
    APPLIED,
    FROZEN,
    REMOVE,
    Applied,
    check_complete,
    check_state,
    load_unfolded,
    remove_parametrization,
    save_unfolded,
)
from lightning_sv.interop.apply.sites import TIED, Site, SiteMatrix
from lightning_sv.interop.apply.weights import (
    OutputNorm,
    Scaled,
    ScaledGamma,
    ScaledPart,
    ScaledWeight,
    output_norm_hook,
    register_unscaled,
)
from lightning_sv.interop.groups import unwrapped
from lightning_sv.scale import DirectScale, OffsetScale, ScaleStrategy, ScaleVector
from lightning_sv.scale.definitions import upcast
from lightning_sv.scale.vector import Role

#: one vector for all matrices behind a norm: the vector itself for the first matrix, a function for the others
SharedVector = Iterator[ScaleVector | Callable[[], Tensor]]


class Change:
    """Changes of a model for a strategy; closing `undo` restores the model exactly.

    `dp_at` has the last parts of the names of matrices with `dp` instead of `dnp`.

    Attributes:
        outputs: path of a linear layer -> the norm of its output
        notes: (name, deviation from the strategy and its reason)
        norms: vector that remains in its norm -> role and origin
    """

    @torch.no_grad()
    def __init__(
        self, model: nn.Module, strategy: ScaleStrategy, dp_at: Collection[str], sites: list[Site], undo: ExitStack
    ):
        self.model, self.strategy, self.dp_at, self.undo = model, strategy, dp_at, undo
        self.row, self.named = strategy.placement_row, dict(model.named_parameters())
        found = (getattr(getattr(module, "config", None), "rms_norm_eps", None) for module in model.modules())
        self.eps = float(next(filter(None, found), 1e-5))
        self.outputs: dict[str, OutputNorm] = {}
        self.notes: list[tuple[str, str]] = []
        self._trains = {name: parameter.requires_grad for name, parameter in self.named.items()}
        self._constants: dict[str, float | None] = {}
        self.norms: dict[str, tuple[Role, float]] = {}
        self._weights: dict[str, None] = {}  # in order
        # a value stays linear in its vector through a norm by hand, up to matrices of that norm's own vector
        self._behind = {name for site in sites if site.role == "input" for name in site.readers}
        self._orders: dict[nn.Module, tuple[str, ...]] = {}
        names = {matrix.word: None for site in sites for matrix in site.matrices} if self.row.norm_out else {}
        for word in dp_at:
            expect(word in names, "dp_at", repr(word), f"one of {' '.join(names)}." if names else "none without dnp.")
        for site in sites:
            if site.origin not in (0.0, 1.0):
                self._note(site.vector, "unchanged, because its norm multiplies by neither w nor 1 + w")
                continue
            self._note_matrices(site)
            (self._site if site.vector else self._bare_site)(site)
        hooks = model.register_forward_pre_hook(check_complete), model.register_load_state_dict_pre_hook(check_state)
        handles = [*hooks]
        for path, module in model.named_modules():
            start = f"{path}." if path else ""
            inside = (unwrapped(name.removeprefix(start)) for name in self._weights if name.startswith(start))
            if hasattr(module, "save_pretrained") and (first := next(inside, "")):
                setattr(module, "save_pretrained", partial(save_unfolded, module, first))  # noqa: B010
                undo.callback(module.__delattr__, "save_pretrained")
                handles.append(module.register_load_state_dict_pre_hook(partial(load_unfolded, first)))
        for handle in handles:
            undo.callback(handle.remove)
        readers = {m: site.vector if site.vector in self.norms else "" for site in sites for m in site.matrices}
        state = (self._constants, frozenset(self._weights), handles, self.norms, list(readers.items()))
        setattr(model, APPLIED, Applied(strategy, *state))
        undo.callback(model.__delattr__, APPLIED)

    def _note(self, name: str, what: str) -> None:
        if (name, what) not in self.notes:  # several norms can share a tied matrix
            self.notes.append((name, what))

    def _note_matrices(self, site: Site) -> None:
        """Note which matrices have no vectors of their own, and why."""
        lacks = "no vector after it" if site.vector else "no own vector"
        if self.row.scale_out or (self.row.scale_in and not site.vector):
            for name in site.tied:
                self._note(name, f"{lacks}, because it is tied; to have one, untie it first")
            for name in site.unfit if site.role == "input" else ():
                self._note(name, f"{lacks}, because it also reads other values, or is not a plain matrix")
        partly = "contains several interleaved matrices that share their vectors: hg is partial"
        for matrix in site.matrices:
            if matrix.mixed and self.strategy.per_branch:
                self._note(matrix.weight, partly)

    def _bare_site(self, site: Site) -> None:
        """Add vectors of ones to the matrices behind a norm without scale vector: one each, or one for all."""
        shared: SharedVector | None = None
        if site.matrices and self.row.scale_in and not self.strategy.per_branch:
            first = min(site.matrices, key=lambda matrix: not self.named[matrix.weight].requires_grad)
            vector = self._vector(first.weight, self._ones(first), "input")
            shared = chain([vector], repeat(vector.__call__))  # stored in the first matrix; FSDP2 gathers it in a hook
        for matrix in site.matrices:
            self._branch(matrix, self._ones(matrix) if self.row.scale_in else None, matrix.weight, shared)

    def _site(self, site: Site) -> None:
        """Move the site's vector to its matrices if the strategy requires it and they can absorb it; else keep it."""
        gamma = upcast(self.named[site.vector]) + (site.origin or 0.0)
        moves = not self.row.scale_in
        if not site.tied:  # of a tied matrix, _note_matrices reports the missing vector after it
            moves = moves or self.strategy.per_branch or self.row.scale_out
        if site.role == "input" and moves and site.stays and not site.matrices:
            self._note(site.vector, f"remains one vector of its norm: {site.stays}")
        if site.role == "output" and moves and not self._behind.issuperset(site.unfit):
            why = "operations other than matrices also read it, so matrices that read it get no vectors"
            self._note(site.vector, f"remains one vector of its norm: {why}")
        branches = sum(len(m.parts) * math.prod(self.named[m.weight].shape[:-2]) for m in site.matrices)
        branches += len(site.tied) + len(site.unfit)
        moved: Tensor | None = None  # gamma, as vectors of the matrices
        if not site.matrices or (self.row.scale_in and (branches == 1 or not self.strategy.per_branch)):
            self._keep(site, gamma)
        elif site.stays and self.row.scale_in:
            self._keep(site, gamma)
            self._note(site.vector, f"shared by all branches, without heterogeneity: {site.stays}")
        elif site.stays:
            self._freeze(site.vector)
            self._constants[site.vector] = None
            self._note(site.vector, f"constant, and not folded into the matrices: {site.stays}")
        else:
            self._neutral(site, gamma)
            if self.row.scale_in:
                moved = gamma
            else:
                self._scale_columns(site.matrices, gamma)
        for matrix in site.matrices:
            self._branch(matrix, None if moved is None else self._unsigned(moved, [matrix]), site.vector)

    def _ones(self, matrix: SiteMatrix) -> Tensor:
        weight = self.named[matrix.weight]
        return upcast(weight).new_ones(weight.shape[matrix.in_axis])

    def _keep(self, site: Site, gamma: Tensor) -> None:
        """Keep gamma in its norm, in the strategy's parameterization."""
        role: Role = "input" if site.role == "input" else "output"
        self.norms[site.vector] = role, site.origin or 0.0
        if site.stays == TIED:
            self._note(site.vector, f"unchanged: {site.stays}")
            return
        if self.strategy.vector is (OffsetScale if site.origin else DirectScale):
            return
        if site.matrices and not site.stays:
            gamma = self._unsigned(gamma, site.matrices, site.bias)
        vector = self._vector(site.vector, gamma, role)
        self._freeze(site.vector)
        self._parametrize(site.vector, ScaledGamma(vector, site.origin or 0.0))

    def _unsigned(self, gamma: Tensor, matrices: Iterable[SiteMatrix], bias: str | None = None) -> Tensor:
        """Return gamma; if the parameterization cannot represent its signs, they move into matrices and bias."""
        if (gamma >= 0).all() or (gamma == 0).any():
            return gamma
        try:
            self.strategy.vector(gamma.shape[-1], "input").set_gamma(gamma.cpu())
        except ValueError:
            self._scale_columns(matrices, gamma.sign())
            if bias is not None:
                self._set(bias, self.named[bias] * gamma.sign())
            return gamma.abs()
        return gamma

    def _neutral(self, site: Site, gamma: Tensor) -> None:
        """Set the norm's gamma to 1; its bias is divided by gamma, because the vectors behind it multiply it."""
        self._constants[site.vector] = neutral = 1 - (site.origin or 0.0)
        self._set(site.vector, torch.full_like(self.named[site.vector], neutral))
        self._freeze(site.vector)
        if site.bias is not None:
            bias = self.named[site.bias]
            if ((gamma == 0) & (bias != 0)).any():
                why = f"{site.vector} has a zero entry at which {site.bias} is not zero"
                raise ConfigError(f"{why}; vectors behind it cannot represent that. Use a strategy without hg and ap.")
            self._set(site.bias, torch.where(gamma == 0, bias, bias / gamma))

    def _branch(
        self, matrix: SiteMatrix, gamma: Tensor | None, source: str, shared: SharedVector | None = None
    ) -> None:
        """Add vectors to a matrix; `gamma` for its input side comes from the parameter `source`."""
        if matrix.weight in self._weights:
            return
        weight, after, normed = self.named[matrix.weight], self.row.scale_out, False
        if self.row.norm_out and matrix.role != "router" and matrix.word not in self.dp_at:
            normed = not matrix.normalized and self._output_norm(matrix, weight)
            after = after and not normed and not matrix.normalized
        if not (after or normed or gamma is not None):
            return
        # With a norm and no vector the weight keeps its value; its new name and type show that it is no plain weight.
        parts = []
        for width in matrix.parts:
            scale_in: ScaleVector | Callable[[], Tensor] | None = None
            scale_out: ScaleVector | None = None
            if gamma is not None:
                wide = gamma.expand(*weight.shape[:-2], -1)
                scale_in = next(shared) if shared is not None else self._vector(source, wide, "input")
            if after:
                ones = upcast(weight).new_ones(*weight.shape[:-2], width)
                scale_out = self._vector(matrix.weight, ones, "output")
            parts.append(ScaledPart(scale_in, scale_out))
        transposed = matrix.in_axis != weight.ndim - 1
        self._parametrize(matrix.weight, ScaledWeight(parts, matrix.parts, transposed, matrix.role))

    def _output_norm(self, matrix: SiteMatrix, weight: Tensor) -> bool:
        """Normalize the output of a matrix's layer; return False, with a note, if it is not a plain linear map."""
        path = matrix.weight.rpartition(".")[0]
        layer = self.model.get_submodule(path)
        if matrix.mixed or len(matrix.parts) > 1 or weight.ndim != 2:
            why = "it holds several matrices"
        elif type(layer) is not nn.Linear:
            why = f"its layer is a {type(layer).__name__.removeprefix('Parametrized')}, not an nn.Linear"
        elif matrix.head_width == 0:
            why = "the channels of a head are not adjacent"
        else:
            why = "the norm of a single output is its sign" if len(weight) == 1 else ""
        if why:
            self._note(matrix.weight, f"dp instead of dnp, because {why}")
            return False
        ones = upcast(weight).new_ones(weight.shape[0])
        vector = self._vector(matrix.weight, ones, "output") if self.row.scale_out else None
        norm = OutputNorm(vector, matrix.head_width or weight.shape[0], self.eps)
        layer.add_module("output_norm", norm)
        self.undo.callback(layer.__delattr__, "output_norm")
        self.undo.callback(layer.register_forward_hook(output_norm_hook).remove)
        norm.site, self.outputs[path] = path, norm
        return True

    def _vector(self, name: str, gamma: Tensor, role: Role) -> ScaleVector:
        """Return a vector with this gamma, on the device of parameter `name` and frozen if that is."""
        with gamma.device:  # the caller may have set another default
            vector = self.strategy.vector(gamma.shape[-1], role, gamma.shape[:-1]).to(gamma.dtype)
        try:
            vector.set_gamma(gamma)
        except ValueError as error:
            hint = "" if gamma.any() else " Or start near 0 instead of at 0."
            raise ConfigError(f"{name} under {str(self.strategy)!r}: {error}{hint}") from error
        return vector.requires_grad_(self._trains[name])

    def _scale_columns(self, matrices: Iterable[SiteMatrix], gamma: Tensor) -> None:
        """W <- W diag(gamma)."""
        for matrix in matrices:
            weight = self.named[matrix.weight]
            self._set(matrix.weight, weight * (gamma if matrix.in_axis == weight.ndim - 1 else gamma.unsqueeze(-1)))

    def _set(self, name: str, value: Tensor) -> None:
        parameter = self._checked(name)
        self.undo.callback(parameter.data.copy_, parameter.detach().clone())
        parameter.copy_(value)

    def _freeze(self, name: str) -> None:
        if self._checked(name).requires_grad:
            path, _, attribute = name.rpartition(".")
            state = vars(self.model.get_submodule(path))
            state[FROZEN] = (*state.get(FROZEN, ()), attribute)
            self.undo.callback(state.pop, FROZEN, None)
            self.undo.callback(self.named[name].requires_grad_, True)
            self.named[name].requires_grad_(False)

    def _parametrize(self, name: str, parametrization: Scaled) -> None:
        self._checked(name)
        path, _, attribute = name.rpartition(".")
        owner = self.model.get_submodule(path)
        parametrization.order = self._orders.setdefault(owner, tuple(owner._parameters))
        parametrization.site = name
        self.undo.callback(remove_parametrization, owner, attribute, parametrization.order, keep=False)
        parametrize.register_parametrization(owner, attribute, parametrization)
        own_class: Any = type(owner)  # torch makes a class for each parametrized module
        own_class.register_parameter = register_unscaled
        self._weights[name] = None

    def _checked(self, name: str) -> nn.Parameter:
        """Return a parameter to change, a plain tensor that is not the input of a different parametrization."""
        parameter = self.named[name]
        fits = parameter.is_floating_point() and type(parameter.data) is Tensor and not parameter.is_meta
        found = f"{parameter.dtype} in a {type(parameter.data).__name__} on {parameter.device.type}"
        expect(fits, name, found, "a plain floating-point tensor: not quantized, not sharded, not fake.")
        if "parametrizations" in name.split("."):
            raise ConfigError(f"{name} is already parametrized; {REMOVE}.")
        return parameter
