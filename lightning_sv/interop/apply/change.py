"""Execution of `Placements` on a model; closing a stack undoes it exactly.

Each change pushes its inverse onto the stack. If an error follows, or if the outputs differ in the
end, the stack runs all inverses in reverse order:

    gamma <- 1        | copy the old gamma back
    bias <- bias / g  | copy the old bias back
    parametrize W     | remove the parametrization
    hooks             | remove the hooks
"""

from collections.abc import Iterable, Iterator
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
from lightning_sv.interop.apply.placements import (
    Gamma,
    PlacedBranch,
    PlacedNorm,
    Placements,
)
from lightning_sv.interop.apply.saving import UnfoldedSave, load_unfolded
from lightning_sv.interop.apply.traced_norm import TracedNorm
from lightning_sv.interop.apply.weights import (
    OutputNorm,
    Scaled,
    ScaledGamma,
    ScaledPart,
    ScaledWeight,
    name_of_original,
    output_norm_hook,
    remove_parametrization,
)
from lightning_sv.interop.groups import unwrapped
from lightning_sv.scale import DirectScale, OffsetScale, ScaleVector
from lightning_sv.scale.definitions import upcast
from lightning_sv.scale.vector import Role


class Change:
    """Changes of a model by a strategy; closing `undo` restores the model exactly.

    Attributes:
        has_output_norms: whether the output of a layer is normalized
        norms: vector that remains in its norm -> role and origin
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module, placements: Placements, undo: ExitStack):
        self.model = model
        self.strategy = placements.strategy
        self.undo = undo
        self.named = placements.named
        self.eps = _norm_eps(model)
        self.has_output_norms = False
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
            *self._change_saving(),
        ]
        for handle in handles:
            self.undo.callback(handle.remove)

        matrices: dict[TracedBranch, str] = {}
        for norm in norms:
            vector = norm.vector if norm.vector in self.norms else ""
            matrices.update(dict.fromkeys(norm.branches, vector))
        vars(self.model)[APPLIED] = Applied(
            self.strategy,
            self._constants,
            frozenset(self._weights),
            handles,
            self.norms,
            list(matrices.items()),
        )
        self.undo.callback(vars(self.model).pop, APPLIED)

    def _change_saving(self) -> Iterator[Any]:
        """Change `save_pretrained` of all parts that have it; yield the handles of loading."""
        for path, module in self.model.named_modules():
            weights = self._weights_in(path)
            if weights and hasattr(module, "save_pretrained"):
                self.undo.callback(UnfoldedSave(module, weights[0]).remove)
                load = partial(load_unfolded, weights[0])
                yield module.register_load_state_dict_pre_hook(load)

    def _weights_in(self, path: str) -> list[str]:
        """Return the computed weights of a module, by their names in the module."""
        start = f"{path}." if path else ""
        names = []
        for name in self._weights:
            if name.startswith(start):
                names.append(unwrapped(name.removeprefix(start)))
        return names

    def _change(self, placed: PlacedNorm) -> None:
        """Change a norm's vector, then the branches behind it."""
        norm = placed.norm
        gamma: Tensor | None = None
        if placed.gamma is not Gamma.ABSENT:
            gamma = upcast(self.named[norm.vector]) + _origin(norm)
            self._change_gamma(placed, gamma)

        for branch in placed.branches:
            self._scale(branch, placed, gamma)

    def _change_gamma(self, placed: PlacedNorm, gamma: Tensor) -> None:
        """Change the vector of a norm, which is `gamma`."""
        norm = placed.norm
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

    def _keep(self, norm: TracedNorm, gamma: Tensor) -> None:
        """Keep gamma in its norm, in the strategy's parameterization."""
        role: Role = "output"
        if norm.role == "input":
            role = "input"
        origin = _origin(norm)
        self.norms[norm.vector] = role, origin
        own_form = OffsetScale if origin else DirectScale
        if self.strategy.vector_class is own_form:
            return
        if gamma.shape[-1] == 1:  # a column (d, 1), or (d, 1, 1) of images
            gamma = gamma.flatten()
        vector = self._vector(norm.vector, gamma, role)
        self._freeze(norm.vector)
        self._parametrize(norm.vector, ScaledGamma(vector, origin))
        self._constants[name_of_original(norm.vector)] = None  # it is not read any more

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

    def _scale(self, placed: PlacedBranch, norm: PlacedNorm, gamma: Tensor | None) -> None:
        """Add vectors to a branch: those before its matrices, and ones after them."""
        branch = placed.branch
        if placed.norm_out:
            self._normalize_output(placed)
        has_vectors_after = placed.scale_out and not placed.norm_out  # a norm has the vector itself
        parts = []
        for width in branch.parts:
            before: ScaleVector | None = None
            after: ScaleVector | None = None
            if norm.scale_in:
                before = self._vector_before(branch, norm.norm, gamma)
            if has_vectors_after:
                after = self._ones_after(branch, width)
            parts.append(ScaledPart(before, after))
        scaled = ScaledWeight(parts, branch.parts, branch.transposed, branch.role)
        self._parametrize(branch.weight, scaled)

    def _vector_before(
        self, branch: TracedBranch, norm: TracedNorm, gamma: Tensor | None
    ) -> ScaleVector:
        """Return a vector before a matrix of a branch; it trains if the norm's vector did.

        Of a norm without a vector it has ones, and trains if the matrix does.
        """
        weight = self.named[branch.weight]
        if gamma is None:
            d_in = branch.rows(weight).shape[-1]
            gamma = upcast(weight).new_ones(d_in)
        rows = gamma.expand(*weight.shape[:-2], -1)  # (d_in) -> (*batch_dims, d_in)
        return self._vector(norm.vector or branch.weight, rows, "input")

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
        if placed.scale_out:
            vector = self._ones_after(branch, d_out)
        norm = OutputNorm(vector, branch.head_width or d_out, self.eps)
        norm.plain_name = path
        layer.add_module("output_norm", norm)
        self.undo.callback(layer.__delattr__, "output_norm")
        self.undo.callback(layer.register_forward_hook(output_norm_hook).remove)
        self.has_output_norms = True

    def _vector(self, name: str, gamma: Tensor, role: Role) -> ScaleVector:
        """Return a vector with this gamma, on its device, frozen if the parameter `name` is."""
        with gamma.device:  # the caller may have set another default
            vector = self.strategy.vector_class(gamma.shape[-1], role, gamma.shape[:-1])
        vector.to(gamma.dtype)
        try:
            vector.set_gamma(gamma)
        except ValueError as error:
            raise ConfigError(f"{name} under {str(self.strategy)!r}: {error}") from error
        return vector.requires_grad_(self._trains[name])

    def _scale_columns(self, branches: Iterable[TracedBranch], gamma: Tensor) -> None:
        """W <- W diag(gamma)."""
        for branch in branches:
            scaled = branch.rows(self.named[branch.weight]) * gamma
            self._set(branch.weight, branch.rows(scaled))

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
        self._weights[name] = None

    def _checked(self, name: str) -> nn.Parameter:
        """Return a parameter to change: a plain tensor, not the input of a parametrization."""
        parameter = self.named[name]
        kind = type(parameter.data)
        is_plain = kind is Tensor and parameter.is_floating_point()
        found = f"{parameter.dtype} in a {kind.__name__}"
        wanted = "a plain floating-point tensor: not quantized and not sharded."
        expect(is_plain, name, found, wanted)
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
        config = getattr(module, "config", None)
        eps = getattr(config, "rms_norm_eps", None)
        if eps:
            return float(eps)
    return 1e-5
