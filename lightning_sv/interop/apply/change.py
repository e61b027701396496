"""Execution of `Placements` on a model; closing a stack undoes it exactly.

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
from lightning_sv.interop.apply.applied import APPLIED, FROZEN, REMOVE, Applied
from lightning_sv.interop.apply.checks import check_complete, check_state
from lightning_sv.interop.apply.matrices import TracedBranch
from lightning_sv.interop.apply.placements import Gamma, PlacedBranch, PlacedNorm, Placements
from lightning_sv.interop.apply.saving import load_unfolded, save_unfolded
from lightning_sv.interop.apply.traced_norm import TracedNorm
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

#: scale vector of a matrix, or a function that returns its gamma if a different matrix owns it
_Source = ScaleVector | Callable[[], Tensor]


class _SharedVector:
    """One vector for all branches of a norm, which the first of them owns.

    The others call it: FSDP2 gathers its parameters in a hook of the call.
    """

    def __init__(self, vector: ScaleVector) -> None:
        self._vector = vector
        self._has_owner = False

    def take(self) -> _Source:
        """Return the vector for its owner, afterwards a function that returns gamma."""
        if self._has_owner:
            return self._vector.__call__
        self._has_owner = True
        return self._vector


class Change:
    """Changes of a model by a strategy; closing `undo` restores the model exactly.

    Attributes:
        outputs: path of a linear layer -> the norm of its output
        norms: vector that remains in its norm -> role and origin
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module, placements: Placements, undo: ExitStack):
        self.model = model
        self.strategy = placements.strategy
        self.undo = undo
        self.named = placements.named
        self.eps = _norm_eps(model)
        self.outputs: dict[str, OutputNorm] = {}
        self.norms: dict[str, tuple[Role, float]] = {}
        self._trains = {name: parameter.requires_grad for name, parameter in self.named.items()}
        self._constants: dict[str, float | None] = {}
        self._weights: dict[str, None] = {}  # computed weights, in order
        self._orders: dict[nn.Module, tuple[str, ...]] = {}
        for placed in placements.norms:
            self._change(placed)

    def register(self, norms: Iterable[TracedNorm]) -> None:
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

        readers: dict[TracedBranch, str] = {}
        for norm in norms:
            vector = norm.vector if norm.vector in self.norms else ""
            readers.update(dict.fromkeys(norm.branches, vector))
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

    def _change(self, placed: PlacedNorm) -> None:
        """Change a norm's vector, then the branches behind it."""
        norm = placed.norm
        if placed.gamma is Gamma.ABSENT:
            self._add_vectors(placed)
            return
        gamma = upcast(self.named[norm.vector]) + _origin(norm)
        match placed.gamma:
            case Gamma.KEPT:
                self._keep(norm, gamma)
            case Gamma.CONSTANT:
                self._freeze(norm.vector)
                self._constants[norm.vector] = None
            case Gamma.MOVED:
                self._neutralize(norm, gamma)
            case Gamma.FOLDED:
                self._neutralize(norm, gamma)
                self._scale_columns(norm.branches, gamma)
        for branch in placed.branches:
            self._move(branch, norm, gamma)

    def _move(self, placed: PlacedBranch, norm: TracedNorm, gamma: Tensor) -> None:
        """Give a branch a vector with the value of its norm's, if it gets one."""
        if not placed.placement.scale_in:
            self._scale(placed, None)
            return
        self._scale(placed, self._vectors_before(placed.branch, gamma, norm.vector))

    def _add_vectors(self, placed: PlacedNorm) -> None:
        """Add vectors of ones behind a norm without one: one per matrix, or one for all."""
        if placed.shares and placed.branches:
            shared = _SharedVector(self._vector_for_all(placed.norm.branches))
            for each in placed.branches:
                self._scale(each, shared.take)
            return
        for each in placed.branches:
            branch = each.branch
            if each.placement.scale_in:
                ones = self._ones(branch)
                self._scale(each, self._vectors_before(branch, ones, branch.weight))
            else:
                self._scale(each, None)

    def _vectors_before(
        self, branch: TracedBranch, gamma: Tensor, source: str
    ) -> Callable[[], ScaleVector]:
        """Return a function that makes a vector before a branch; it trains if `source` does."""
        lead = self.named[branch.weight].shape[:-2]
        each = gamma.expand(*lead, -1)  # (d_in) -> (*batch_dims, d_in)
        return partial(self._vector, source, each, "input")

    def _vector_for_all(self, branches: Sequence[TracedBranch]) -> ScaleVector:
        """Return a vector of ones, which trains if one of the matrices does."""
        trained = [branch for branch in branches if self._trains[branch.weight]]
        like = (trained or branches)[0]
        return self._vector(like.weight, self._ones(like), "input")

    def _ones(self, branch: TracedBranch) -> Tensor:
        weight = self.named[branch.weight]
        return upcast(weight).new_ones(weight.shape[branch.in_axis])

    def _keep(self, norm: TracedNorm, gamma: Tensor) -> None:
        """Keep gamma in its norm, in the strategy's parameterization."""
        role: Role = "input" if norm.role == "input" else "output"
        origin = _origin(norm)
        self.norms[norm.vector] = role, origin
        has_form = self.strategy.vector_class is (OffsetScale if origin else DirectScale)
        if norm.is_tied or has_form:
            return
        vector = self._vector(norm.vector, gamma, role)
        self._freeze(norm.vector)
        self._parametrize(norm.vector, ScaledGamma(vector, origin))

    def _neutralize(self, norm: TracedNorm, gamma: Tensor) -> None:
        """Set the norm's gamma to 1, and divide its bias, which the vectors behind it multiply."""
        neutral = 1 - _origin(norm)
        self._constants[norm.vector] = neutral
        self._set(norm.vector, torch.full_like(self.named[norm.vector], neutral))
        self._freeze(norm.vector)
        if norm.bias is None:
            return
        bias = self.named[norm.bias]
        if ((gamma == 0) & (bias != 0)).any():
            why = f"{norm.vector} has a zero entry at which {norm.bias} is not zero"
            hint = "Use a strategy without hg and ap."
            raise ConfigError(f"{why}; vectors behind it cannot represent that. {hint}")
        self._set(norm.bias, torch.where(gamma == 0, bias, bias / gamma))

    def _scale(self, placed: PlacedBranch, scale_in: Callable[[], _Source] | None) -> None:
        """Add vectors to a branch; `scale_in` returns the next one before it."""
        branch = placed.branch
        weight = self.named[branch.weight]
        if placed.placement.norm_out:
            self._normalize_output(placed)
        parts = []
        for width in branch.parts:
            source = None if scale_in is None else scale_in()
            parts.append(ScaledPart(source, self._scale_out(placed, width)))
        transposed = branch.in_axis != weight.ndim - 1
        scaled = ScaledWeight(parts, branch.parts, transposed, branch.role)
        self._parametrize(branch.weight, scaled)

    def _scale_out(self, placed: PlacedBranch, width: int) -> ScaleVector | None:
        """Return a vector of ones after a matrix, unless it gets none or the norm has it."""
        placement = placed.placement
        if placement.norm_out or not placement.scale_out:
            return None
        return self._ones_after(placed.branch, width)

    def _ones_after(self, branch: TracedBranch, width: int) -> ScaleVector:
        weight = self.named[branch.weight]
        ones = upcast(weight).new_ones(*weight.shape[:-2], width)  # (*batch_dims, d_out)
        return self._vector(branch.weight, ones, "output")

    def _normalize_output(self, placed: PlacedBranch) -> None:
        """Normalize the output of a branch's layer, in heads if it has them."""
        branch = placed.branch
        path = branch.weight.rpartition(".")[0]
        layer = self.model.get_submodule(path)
        d_out = len(self.named[branch.weight])
        vector: ScaleVector | None = None
        if placed.placement.scale_out:
            vector = self._ones_after(branch, d_out)
        norm = OutputNorm(vector, branch.head_width or d_out, self.eps)
        norm.plain_name = path
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

    def _scale_columns(self, branches: Iterable[TracedBranch], gamma: Tensor) -> None:
        """W <- W diag(gamma)."""
        for branch in branches:
            weight = self.named[branch.weight]
            is_last = branch.in_axis == weight.ndim - 1
            factor = gamma if is_last else gamma.unsqueeze(-1)  # (d_in) or (d_in, 1)
            self._set(branch.weight, weight * factor)

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
        parametrization.plain_name = name
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


def _origin(norm: TracedNorm) -> float:
    """Return c of gamma = w + c."""
    assert norm.origin is not None  # `Placements` leaves other norms unchanged
    return norm.origin


def _norm_eps(model: nn.Module) -> float:
    """Return the epsilon of a model's norms, from the first configuration that has one."""
    for module in model.modules():
        eps = getattr(getattr(module, "config", None), "rms_norm_eps", None)
        if eps:
            return float(eps)
    return 1e-5
