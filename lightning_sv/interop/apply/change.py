"""Execution of a `Plan` on a model; closing a stack undoes it exactly.

Each change pushes its inverse onto the stack. If an error follows, or if the outputs differ in the
end, the stack runs all inverses in reverse order:

    gamma <- 1        | copy the old gamma back
    bias <- bias / g  | copy the old bias back
    parametrize W     | remove the parametrization
    hooks             | remove the hooks
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
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
)
from lightning_sv.interop.apply.matrices import SiteMatrix
from lightning_sv.interop.apply.plan import BranchPlan, Gamma, Plan, SitePlan
from lightning_sv.interop.apply.saving import load_unfolded, save_unfolded
from lightning_sv.interop.apply.site import Site
from lightning_sv.interop.apply.weights import (
    OutputNorm,
    Scaled,
    ScaledGamma,
    ScaledPart,
    ScaledWeight,
    output_norm_hook,
    register_unscaled,
    remove_parametrization,
)
from lightning_sv.interop.groups import unwrapped
from lightning_sv.scale import DirectScale, OffsetScale, ScaleVector
from lightning_sv.scale.definitions import upcast
from lightning_sv.scale.vector import Role


class _SharedVector:
    """One vector for all matrices behind a norm, which the first of them owns.

    The others call it: FSDP2 gathers its parameters in a hook of the call.
    """

    def __init__(self, vector: ScaleVector) -> None:
        self._vector = vector
        self._has_owner = False

    def take(self) -> ScaleVector | Callable[[], Tensor]:
        """Return the vector for its owner, afterwards a function that returns gamma."""
        if self._has_owner:
            return self._vector.__call__
        self._has_owner = True
        return self._vector


class Change:
    """Changes of a model by a plan; closing `undo` restores the model exactly.

    Attributes:
        outputs: path of a linear layer -> the norm of its output
        norms: vector that remains in its norm -> role and origin
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module, plan: Plan, undo: ExitStack):
        self.model = model
        self.strategy = plan.strategy
        self.undo = undo
        self.named = plan.named
        self.eps = _norm_eps(model)
        self.outputs: dict[str, OutputNorm] = {}
        self.norms: dict[str, tuple[Role, float]] = {}
        self._trains = {name: parameter.requires_grad for name, parameter in self.named.items()}
        self._constants: dict[str, float | None] = {}
        self._weights: dict[str, None] = {}  # computed weights, in order
        self._orders: dict[nn.Module, tuple[str, ...]] = {}
        for site in plan.sites:
            self._change(site)

    def register(self, sites: Iterable[Site]) -> None:
        """Register the checks of the model, and its `Applied`."""
        handles: list[Any] = [
            self.model.register_forward_pre_hook(check_complete),
            self.model.register_load_state_dict_pre_hook(check_state),
        ]
        for path, module in self.model.named_modules():
            first = self._first_weight_in(path)
            if first is not None and hasattr(module, "save_pretrained"):
                setattr(module, "save_pretrained", partial(save_unfolded, module, first))  # noqa: B010
                self.undo.callback(module.__delattr__, "save_pretrained")
                load = partial(load_unfolded, first)
                handles.append(module.register_load_state_dict_pre_hook(load))
        for handle in handles:
            self.undo.callback(handle.remove)

        readers: dict[SiteMatrix, str] = {}
        for site in sites:
            vector = site.vector if site.vector in self.norms else ""
            readers.update(dict.fromkeys(site.matrices, vector))
        applied = Applied(
            self.strategy,
            self._constants,
            frozenset(self._weights),
            handles,
            self.norms,
            list(readers.items()),
        )
        setattr(self.model, APPLIED, applied)
        self.undo.callback(self.model.__delattr__, APPLIED)

    def _first_weight_in(self, path: str) -> str | None:
        """Return the first computed weight of a module, by its name in the module."""
        start = f"{path}." if path else ""
        for name in self._weights:
            if name.startswith(start):
                return unwrapped(name.removeprefix(start))
        return None

    def _change(self, plan: SitePlan) -> None:
        """Change a norm's vector, then the matrices behind it."""
        site = plan.site
        if plan.gamma is Gamma.ABSENT:
            self._add_vectors(plan)
            return
        gamma = upcast(self.named[site.vector]) + (site.origin or 0.0)
        if plan.gamma is Gamma.KEPT:
            self._keep(site, gamma)
        elif plan.gamma is Gamma.CONSTANT:
            self._freeze(site.vector)
            self._constants[site.vector] = None
        else:
            self._neutralize(site, gamma)
        if plan.gamma is Gamma.FOLDED:
            self._scale_columns(site.matrices, gamma)
        for branch in plan.branches:
            scale_in = self._unsigned(gamma, [branch.matrix]) if branch.scale_in else None
            self._branch(branch, scale_in, site.vector)

    def _add_vectors(self, plan: SitePlan) -> None:
        """Add vectors of ones behind a norm without one: one per matrix, or one for all."""
        shared: _SharedVector | None = None
        matrices = plan.site.matrices
        if plan.shares and matrices:
            shared = _SharedVector(self._vector_for_all(matrices))
        for branch in plan.branches:
            matrix = branch.matrix
            scale_in = self._ones(matrix) if branch.scale_in else None
            self._branch(branch, scale_in, matrix.weight, shared)

    def _vector_for_all(self, matrices: Sequence[SiteMatrix]) -> ScaleVector:
        """Return a vector of ones, which trains if one of the matrices does."""
        trained = [matrix for matrix in matrices if self._trains[matrix.weight]]
        like = (trained or matrices)[0]
        return self._vector(like.weight, self._ones(like), "input")

    def _ones(self, matrix: SiteMatrix) -> Tensor:
        weight = self.named[matrix.weight]
        return upcast(weight).new_ones(weight.shape[matrix.in_axis])

    def _keep(self, site: Site, gamma: Tensor) -> None:
        """Keep gamma in its norm, in the strategy's parameterization."""
        role: Role = "input" if site.role == "input" else "output"
        origin = site.origin or 0.0
        self.norms[site.vector] = role, origin
        has_form = self.strategy.vector_class is (OffsetScale if origin else DirectScale)
        if site.is_tied or has_form:
            return
        can_move_signs = site.matrices and site.stays is None
        if can_move_signs:
            gamma = self._unsigned(gamma, site.matrices, site.bias)
        vector = self._vector(site.vector, gamma, role)
        self._freeze(site.vector)
        self._parametrize(site.vector, ScaledGamma(vector, origin))

    def _unsigned(
        self, gamma: Tensor, matrices: Iterable[SiteMatrix], bias: str | None = None
    ) -> Tensor:
        """Return gamma; signs that its form cannot represent move into matrices and bias."""
        if (gamma >= 0).all() or (gamma == 0).any():
            return gamma
        try:
            self.strategy.vector_class(gamma.shape[-1], "input").set_gamma(gamma.cpu())
        except ValueError:
            self._scale_columns(matrices, gamma.sign())
            if bias is not None:
                self._set(bias, self.named[bias] * gamma.sign())
            return gamma.abs()
        return gamma

    def _neutralize(self, site: Site, gamma: Tensor) -> None:
        """Set the norm's gamma to 1, and divide its bias, which the vectors behind it multiply."""
        neutral = 1 - (site.origin or 0.0)
        self._constants[site.vector] = neutral
        self._set(site.vector, torch.full_like(self.named[site.vector], neutral))
        self._freeze(site.vector)
        if site.bias is None:
            return
        bias = self.named[site.bias]
        if ((gamma == 0) & (bias != 0)).any():
            why = f"{site.vector} has a zero entry at which {site.bias} is not zero"
            hint = "Use a strategy without hg and ap."
            raise ConfigError(f"{why}; vectors behind it cannot represent that. {hint}")
        self._set(site.bias, torch.where(gamma == 0, bias, bias / gamma))

    def _branch(
        self,
        plan: BranchPlan,
        gamma: Tensor | None,
        source: str,
        shared: _SharedVector | None = None,
    ) -> None:
        """Add vectors to a matrix; `gamma` before it has the device of the parameter `source`."""
        matrix = plan.matrix
        weight = self.named[matrix.weight]
        lead = weight.shape[:-2]
        if plan.norm:
            self._normalize_output(matrix, weight)
        parts = []
        for width in matrix.parts:
            scale_in: ScaleVector | Callable[[], Tensor] | None = None
            if shared is not None:
                scale_in = shared.take()
            elif gamma is not None:
                each = gamma.expand(*lead, -1)  # (d_in) -> (*batch_dims, d_in)
                scale_in = self._vector(source, each, "input")
            scale_out: ScaleVector | None = None
            if plan.scale_out:
                ones = upcast(weight).new_ones(*lead, width)  # (*batch_dims, d_out)
                scale_out = self._vector(matrix.weight, ones, "output")
            parts.append(ScaledPart(scale_in, scale_out))
        transposed = matrix.in_axis != weight.ndim - 1
        scaled = ScaledWeight(parts, matrix.parts, transposed, matrix.role)
        self._parametrize(matrix.weight, scaled)

    def _normalize_output(self, matrix: SiteMatrix, weight: Tensor) -> None:
        """Normalize the output of a matrix's layer, in heads if it has them."""
        path = matrix.weight.rpartition(".")[0]
        layer = self.model.get_submodule(path)
        d_out = weight.shape[0]
        vector: ScaleVector | None = None
        if self.strategy.placement_row.scale_out:
            vector = self._vector(matrix.weight, upcast(weight).new_ones(d_out), "output")
        norm = OutputNorm(vector, matrix.head_width or d_out, self.eps)
        norm.site = path
        layer.add_module("output_norm", norm)
        self.undo.callback(layer.__delattr__, "output_norm")
        self.undo.callback(layer.register_forward_hook(output_norm_hook).remove)
        self.outputs[path] = norm

    def _vector(self, name: str, gamma: Tensor, role: Role) -> ScaleVector:
        """Return a vector with this gamma, on its device, frozen if the parameter `name` is."""
        with gamma.device:  # the caller may have set another default
            vector = self.strategy.vector_class(gamma.shape[-1], role, gamma.shape[:-1])
        vector.to(gamma.dtype)
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
            is_last = matrix.in_axis == weight.ndim - 1
            factor = gamma if is_last else gamma.unsqueeze(-1)  # (d_in) or (d_in, 1)
            self._set(matrix.weight, weight * factor)

    def _set(self, name: str, value: Tensor) -> None:
        parameter = self._checked(name)
        self.undo.callback(parameter.data.copy_, parameter.detach().clone())
        parameter.copy_(value)

    def _freeze(self, name: str) -> None:
        parameter = self._checked(name)
        if not parameter.requires_grad:
            return
        path, _, attribute = name.rpartition(".")
        state = vars(self.model.get_submodule(path))
        state[FROZEN] = (*state.get(FROZEN, ()), attribute)
        self.undo.callback(state.pop, FROZEN, None)
        self.undo.callback(parameter.requires_grad_, True)
        parameter.requires_grad_(False)

    def _parametrize(self, name: str, parametrization: Scaled) -> None:
        self._checked(name)
        path, _, attribute = name.rpartition(".")
        owner = self.model.get_submodule(path)
        order = self._orders.setdefault(owner, tuple(owner._parameters))
        parametrization.order = order
        parametrization.site = name
        self.undo.callback(remove_parametrization, owner, attribute, order, keep=False)
        parametrize.register_parametrization(owner, attribute, parametrization)
        own_class: Any = type(owner)  # torch makes a class for each parametrized module
        own_class.register_parameter = register_unscaled
        self._weights[name] = None

    def _checked(self, name: str) -> nn.Parameter:
        """Return a parameter to change: a plain tensor, not the input of a parametrization."""
        parameter = self.named[name]
        is_plain = type(parameter.data) is Tensor and not parameter.is_meta
        kind = f"{parameter.dtype} in a {type(parameter.data).__name__} on {parameter.device.type}"
        wanted = "a plain floating-point tensor: not quantized, not sharded, not fake."
        expect(is_plain and parameter.is_floating_point(), name, kind, wanted)
        if "parametrizations" in name.split("."):
            raise ConfigError(f"{name} is already parametrized; {REMOVE}.")
        return parameter


def _norm_eps(model: nn.Module) -> float:
    """Return the epsilon of a model's norms, from the first configuration that has one."""
    for module in model.modules():
        eps = getattr(getattr(module, "config", None), "rms_norm_eps", None)
        if eps:
            return float(eps)
    return 1e-5
