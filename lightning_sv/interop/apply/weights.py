"""Parametrizations: a matrix times scale vectors, or a norm's scale vector in a different form."""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_sv.errors import ConfigError, RunError
from lightning_sv.roles.types import ModelRole
from lightning_sv.scale import ScaleVector, normalize
from lightning_sv.scale.definitions import effective_weight


class ComputedTensor(Tensor):
    """A computed weight, which rejects changes in place, also of its views, and assignments to `data`.

    Tools such as LoRA's merge and initializations change weights, and the next computation would silently undo that.
    Results of functions are plain tensors. `detach()` is plain too, so that `nn.Parameter(weight.detach())` works.
    """

    # Functions get the tensor itself, because autograd refers to it (checkpoints, hooks, retain_grad).
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """Return the values, without gradient."""
        return _computed(Tensor.data.__get__(self))  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        _refuse()


def _computed(weight: Tensor) -> Tensor:
    """Return a weight that rejects changes, if it is a plain tensor outside compiled code."""
    if torch.compiler.is_compiling() or type(weight) is not Tensor:
        return weight
    return weight.as_subclass(ComputedTensor)


def _refuse(*args: Any, **kwargs: Any) -> None:
    hint = "Call fold_applied(model) before LoRA's merge and other changes of weights."
    raise RunError(f"cannot assign to this weight, because it is computed from a matrix and scale vectors. {hint}")


def _view(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method whose results reject changes if they are views of more than one number."""

    def call(*args: Any, **kwargs: Any) -> Any:
        out = method(*args, **kwargs)
        return tree_map_only(Tensor, lambda each: _computed(each) if each.ndim and each._is_view() else each, out)

    return call


#: `zero_`, `normal_`, ...; `+=` and `weight[i] =`
_CHANGES = r"(?!requires_grad_|detach_|share_memory_)[a-z]\w*_|__(i(add|sub|mul|truediv|floordiv|mod|pow)|setitem)__"
for _name in dir(Tensor):
    if re.fullmatch(_CHANGES, _name):
        setattr(ComputedTensor, _name, _refuse)
for _name in (
    "__getitem__", "chunk", "flatten", "narrow", "reshape", "select", "split", "t", "transpose", "unbind", "view",
):  # fmt: skip
    setattr(ComputedTensor, _name, _view(getattr(Tensor, _name)))


class Scaled(nn.Module):
    """Base of the modules that a strategy adds.

    Attributes:
        site: name of the weight, or path of the layer, in the plain model
        order: for a parametrization, previous names of its module's parameters
    """

    site: str = ""
    order: tuple[str, ...] = ()


class ScaledPart(nn.Module):
    """Scale vectors of one matrix: diag(gamma_out) W diag(gamma_in).

    Args:
        scale_in: source of gamma_in, (*batch_dims, d_in); None for 1; a function if a different part owns the vector
        scale_out: source of gamma_out, (*batch_dims, d_out); None for 1
    """

    def __init__(self, scale_in: ScaleVector | Callable[[], Tensor] | None, scale_out: ScaleVector | None):
        super().__init__()
        self.scale_in, self.scale_out = scale_in, scale_out

    def forward(self, weight: Tensor) -> Tensor:
        """(*batch_dims, d_out, d_in) -> the same shape, in the vectors' dtype if that is wider."""
        gamma_in = None if self.scale_in is None else self.scale_in()
        return effective_weight(weight, gamma_in, None if self.scale_out is None else self.scale_out())


class ScaledWeight(Scaled):
    """Parametrization that multiplies the matrices in a weight by their scale vectors.

    Args:
        parts: scale vectors of each matrix
        widths: d_out of each matrix, in the weight's order
        transposed: if True, the weight is stored as (*batch_dims, d_in, d_out)
        role: role of the weight without the strategy; behind the norm of `dnp` a head would look like a matrix
    """

    def __init__(self, parts: list[ScaledPart], widths: tuple[int, ...], transposed: bool, role: ModelRole):
        super().__init__()
        self.parts, self.widths, self.transposed = nn.ModuleList(parts), widths, transposed
        self.role_of_original = role

    def forward(self, weight: Tensor) -> Tensor:
        """W -> diag(gamma_out) W diag(gamma_in), in W's dtype."""
        # FlopCounterMode cannot track views of a parameter made under no_grad. torch.jit.trace compares both modes.
        if not torch.is_grad_enabled() and not torch.jit.is_tracing():  # type: ignore[attr-defined]
            weight = weight.detach()
        rows = (weight.mT if self.transposed else weight).split(self.widths, -2)
        scaled = [part(block) for part, block in zip(self.parts, rows, strict=True)]
        out = scaled[0] if len(scaled) == 1 else torch.cat(scaled, -2)
        return _computed((out.mT.contiguous() if self.transposed else out).to(weight.dtype))


def register_unscaled(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    """Register a parameter, as nn.Module.register_parameter, unless it replaces a computed weight.

    Tensor parallelism and quantization do that, and would fail with torch's words on names with dots.

    Raises:
        ConfigError: the weight is computed
    """
    computed: Any = module._modules["parametrizations"]
    parts = name.split(".")
    if name in computed or parts[0] == "parametrizations":
        hint = "Call fold_applied(model) before tensor parallelism and quantization."
        raise ConfigError(f"{name} cannot be replaced: a weight is computed from a matrix and scale vectors. {hint}")
    nn.Module.register_parameter(module, name, parameter)


class ScaledGamma(Scaled):
    """Parametrization that replaces a norm's vector by gamma - `origin`, the constant that the norm adds to it."""

    def __init__(self, vector: ScaleVector, origin: float):
        super().__init__()
        self.vector, self.origin = vector, origin

    def forward(self, stored: Tensor) -> Tensor:
        """Return gamma - origin, in the shape and dtype of the stored vector."""
        return _computed((self.vector() - self.origin).view_as(stored).to(stored.dtype))


class OutputNorm(Scaled):
    """gamma * Norm(y) of a linear layer's output y, in heads of `width` channels (`dnp`), as a forward hook."""

    def __init__(self, scale: ScaleVector | None, width: int, eps: float):
        super().__init__()
        self.scale, self.width, self.eps = scale, width, eps

    def forward(self, y: Tensor) -> Tensor:
        """(..., d_out) -> (..., d_out)."""
        heads = y.unflatten(-1, (-1, self.width))
        gamma = None if self.scale is None else self.scale().unflatten(-1, (-1, self.width))
        return normalize(heads, self.eps, gamma).flatten(-2)


def output_norm_hook(module: nn.Module, args: Any, output: Tensor) -> Any:
    """Apply a linear layer's submodule `output_norm`, as a forward hook."""
    norm: Any = module.output_norm  # of this module: the hook is copied with it
    return norm(output)
