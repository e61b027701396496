"""Parametrizations: a matrix times scale vectors, or a norm's scale vector in a different form.

The model's own code reads `layer.weight`, and must not change. So torch's parametrization keeps the
matrix as `original` and computes the weight at each read:

    layer.parametrizations.weight.original  W    (d_out, d_in)   trained
    layer.parametrizations.weight[0]        gamma_in, gamma_out  trained
    layer.weight = diag(gamma_out) W diag(gamma_in)              computed

Only the norm of `dnp` is no factor of the weight. It is a hook on the layer's output.
"""

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_map_only

from lightning_sv.errors import RunError
from lightning_sv.roles.types import ModelRole
from lightning_sv.scale import ScaleVector, normalize
from lightning_sv.scale.fast import effective_weight
from lightning_sv.scale.vector import gamma_of

#: `zero_`, `normal_`, ...; `+=` and `weight[i] =`
_CHANGES = re.compile(
    r"(?!requires_grad_|detach_|share_memory_)[a-z]\w*_"
    r"|__(i(add|sub|mul|truediv|floordiv|mod|pow)|setitem)__"
)
_VIEWS = frozenset(
    {
        "__getitem__", "chunk", "flatten", "narrow", "reshape", "select", "split", "t", "transpose",
        "unbind", "view",
    }
)  # fmt: skip


class ComputedTensor(Tensor):
    """A computed weight, which rejects changes in place, also of its views, and of `data`.

    Tools such as LoRA's merge and initializations change weights, and the next computation would
    silently undo that. Results of functions are plain tensors. `detach()` is plain too, so that
    `nn.Parameter(weight.detach())` works.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function on the tensor itself, because autograd refers to it; refuse changes."""
        kwargs = kwargs or {}
        first = next(iter((*args, *kwargs.values())))  # nn.init passes a keyword
        if _changes_first(func) and isinstance(first, cls):
            hint = "Call fold_applied(model) before LoRA's merge and other changes of weights."
            what = "because it is computed from a matrix and scale vectors"
            raise RunError(f"cannot assign to this weight, {what}. {hint}")
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
        if func == _GET_DATA:
            return _computed(out)
        if func.__name__ in _VIEWS:
            return tree_map_only(Tensor, _computed_view, out)
        return out


_GET_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


def _changes_first(func: Any) -> bool:
    """Return True for a function that changes its first argument in place."""
    return func == _SET_DATA or _CHANGES.fullmatch(func.__name__) is not None


def _computed(weight: Tensor) -> Tensor:
    """Return a weight that rejects changes, if it is a plain tensor outside compiled code."""
    if torch.compiler.is_compiling() or type(weight) is not Tensor:
        return weight
    return weight.as_subclass(ComputedTensor)


def _computed_view(result: Tensor) -> Tensor:
    """Return a view of more than one number that rejects changes; copies stay plain."""
    if result.ndim == 0 or not result._is_view():
        return result
    return _computed(result)


class Scaled(nn.Module):
    """Base of the modules that a strategy adds.

    Attributes:
        plain_name: name of the weight, or path of the layer, in the plain model
        order: for a parametrization, previous names of its module's parameters
    """

    plain_name: str = ""
    order: tuple[str, ...] = ()


def scaled_modules(model: nn.Module) -> dict[str, Scaled]:
    """Return name in the plain model -> what a strategy added there."""
    added = {}
    for module in model.modules():
        if isinstance(module, Scaled):
            added[module.plain_name] = module
    return added


def name_of_original(weight: str) -> str:
    """Return the name of the parameter from which a parametrized weight is computed."""
    path, _, attribute = weight.rpartition(".")
    return f"{path}.parametrizations.{attribute}.original".removeprefix(".")


class ScaledPart(nn.Module):
    """Scale vectors of one matrix: diag(gamma_out) W diag(gamma_in).

    Args:
        scale_in: vector gamma_in, (*batch_dims, d_in); None for 1
        scale_out: vector gamma_out, (*batch_dims, d_out); None for 1
    """

    def __init__(self, scale_in: ScaleVector | None, scale_out: ScaleVector | None):
        super().__init__()
        self.scale_in = scale_in
        self.scale_out = scale_out

    def forward(self, weight: Tensor) -> Tensor:
        """(*batch_dims, d_out, d_in) -> the same shape, in the vectors' dtype if that is wider."""
        return effective_weight(weight, gamma_of(self.scale_in), gamma_of(self.scale_out))


class ScaledWeight(Scaled):
    """Parametrization that multiplies the matrices in a weight by their scale vectors.

    Args:
        parts: scale vectors of each matrix
        widths: d_out of each matrix, in the weight's order
        transposed: if True, the weight is stored as (*batch_dims, d_in, d_out)
        role: role of the weight without the strategy; behind the norm of `dnp` a head would look
            like a matrix
    """

    def __init__(
        self, parts: list[ScaledPart], widths: tuple[int, ...], transposed: bool, role: ModelRole
    ):
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.widths = widths
        self.transposed = transposed
        self.role_of_original = role

    def forward(self, weight: Tensor) -> Tensor:
        """W -> diag(gamma_out) W diag(gamma_in), in W's dtype."""
        # FlopCounterMode cannot track views of a parameter made under no_grad. torch.jit.trace
        # compares both modes.
        if not torch.is_grad_enabled() and not torch.jit.is_tracing():  # type: ignore[attr-defined]
            weight = weight.detach()
        dtype = weight.dtype
        if self.transposed:
            weight = weight.mT
        out = self._scaled(weight)
        if self.transposed:
            out = out.mT.contiguous()  # (*batch_dims, d_in, sum of widths)
        return _computed(out.to(dtype))

    def _scaled(self, rows: Tensor) -> Tensor:
        """(*batch_dims, sum of widths, d_in) -> the same shape."""
        if len(self.widths) == 1:
            return self.parts[0](rows)  # type: ignore[no-any-return]
        blocks = rows.split(self.widths, -2)
        scaled = [part(block) for part, block in zip(self.parts, blocks, strict=True)]
        return torch.cat(scaled, -2)


class ScaledGamma(Scaled):
    """Parametrization that replaces a norm's vector by gamma - `origin`, which the norm adds."""

    def __init__(self, vector: ScaleVector, origin: float):
        super().__init__()
        self.vector = vector
        self.origin = origin

    def forward(self, stored: Tensor) -> Tensor:
        """Return gamma - origin, in the shape and dtype of the stored vector."""
        return _computed((self.vector() - self.origin).view_as(stored).to(stored.dtype))


class OutputNorm(Scaled):
    """gamma * Norm(y) of a linear layer's output y, in heads of `width` channels (`dnp`)."""

    def __init__(self, scale: ScaleVector | None, width: int, eps: float):
        super().__init__()
        self.scale = scale
        self.width = width
        self.eps = eps

    def forward(self, y: Tensor) -> Tensor:
        """(..., d_out) -> (..., d_out)."""
        heads = y.unflatten(-1, (-1, self.width))  # (..., d_out / width, width)
        if self.scale is None:
            return normalize(heads, self.eps, None).flatten(-2)
        gamma = self.scale().unflatten(-1, (-1, self.width))
        return normalize(heads, self.eps, gamma).flatten(-2)


def output_norm_hook(module: nn.Module, args: Any, output: Tensor) -> Any:
    """Apply a linear layer's submodule `output_norm`, as a forward hook."""
    norm: Any = module.output_norm  # of this module: the hook is copied with it
    return norm(output)


def remove_parametrization(
    owner: nn.Module, attribute: str, order: tuple[str, ...], *, keep: bool
) -> None:
    """Remove a parametrization, and restore the order of the module's parameters.

    The parameter is then the computed weight (`keep`) or the original one.

    torch gives a parametrized module a class of its own, with a property for the weight, and
    deletes this property from the class. Deep copies share the class, and would lose their weight
    with it. So the module first gets a copy of the class; torch has no public way to do that.
    """
    if not parametrize.is_parametrized(owner, attribute):
        return
    shared = type(owner)
    members = dict(vars(shared))
    members.pop("__dict__", None)  # every class makes its own
    members.pop("__weakref__", None)
    owner.__class__ = type(shared.__name__, shared.__bases__, members)
    parametrize.remove_parametrizations(owner, attribute, leave_parametrized=keep)
    for name in order:
        if name in owner._parameters:
            owner._parameters[name] = owner._parameters.pop(name)
