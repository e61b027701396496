"""What stands in a weight's place: a matrix times scale vectors, or a norm's scale vector in another form."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_sv.errors import RunError
from lightning_sv.scale import ScaleVector, normalize
from lightning_sv.scale.fold import effective_weight


class ComputedTensor(Tensor):
    """A weight that is computed: it refuses a new `data`, which the next computation would not know of.

    That is how LoRA's merge and other tools change weights, and the change would be lost without a word.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """Return the numbers, without gradient."""
        return Tensor.data.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        raise RunError(
            "this weight is computed from a matrix and scale vectors, and what is put into it would be lost; call "
            "fold_applied(model) before LoRA's merge and whatever else changes weights."
        )


def _computed(weight: Tensor) -> Tensor:
    """Return a weight that refuses a new `data`, where it is a plain tensor; compiled code has nobody to refuse."""
    if torch.compiler.is_compiling() or type(weight) is not Tensor:
        return weight
    return weight.as_subclass(ComputedTensor)


class ScaledPart(nn.Module):
    """The scale vectors of one matrix: diag(gamma_out) W diag(gamma_in).

    Args:
        scale_in: gives gamma_in, (*batch_dims, d_in); None for 1. A vector that another part holds comes as a function
        scale_out: gives gamma_out, (*batch_dims, d_out); None for 1
    """

    def __init__(self, scale_in: ScaleVector | Callable[[], Tensor] | None, scale_out: ScaleVector | None):
        super().__init__()
        self.scale_in, self.scale_out = scale_in, scale_out

    def forward(self, weight: Tensor) -> Tensor:
        """(*batch_dims, d_out, d_in) -> the same shape, in the vectors' dtype if that is wider."""
        gamma_in = None if self.scale_in is None else self.scale_in()
        return effective_weight(weight, gamma_in, None if self.scale_out is None else self.scale_out())


class ScaledWeight(nn.Module):
    """A parametrization: the matrices that a weight holds, each times its own scale vectors.

    Args:
        parts: of each matrix
        widths: d_out of each, in the weight's order
        transposed: the weight is stored (*batch_dims, d_in, d_out)

    Attributes:
        order: names of the module's parameters before
        site: name of the weight in the plain model
    """

    def __init__(self, parts: list[ScaledPart], widths: tuple[int, ...], transposed: bool):
        super().__init__()
        self.parts, self.widths, self.transposed = nn.ModuleList(parts), widths, transposed
        self.order: list[str] = []
        self.site = ""

    def forward(self, weight: Tensor) -> Tensor:
        """W -> diag(gamma_out) W diag(gamma_in), in W's dtype."""
        rows = (weight.mT if self.transposed else weight).split(self.widths, -2)
        scaled = [part(block) for part, block in zip(self.parts, rows, strict=True)]
        out = scaled[0] if len(scaled) == 1 else torch.cat(scaled, -2)
        return _computed((out.mT.contiguous() if self.transposed else out).to(weight.dtype))


class ScaledGamma(nn.Module):
    """A parametrization: what a norm stores is a ScaleVector's gamma, less `origin`.

    Args:
        vector: gives gamma
        origin: the norm multiplies by this plus what it stores

    Attributes:
        order, site: as those of `ScaledWeight`
    """

    def __init__(self, vector: ScaleVector, origin: float):
        super().__init__()
        self.vector, self.origin = vector, origin
        self.order: list[str] = []
        self.site = ""

    def forward(self, stored: Tensor) -> Tensor:
        """Return gamma - origin, in the shape and dtype of what is stored."""
        gamma: Tensor = self.vector()
        return _computed((gamma - self.origin if self.origin else gamma).view_as(stored).to(stored.dtype))


class OutputNorm(nn.Module):
    """gamma * Norm(y) of a linear layer's output y, head by head (`dnp`).

    Args:
        scale: gives gamma, (d_out,)
        width: what is normalized together
        eps: of the norm

    Attributes:
        site: path of the layer
    """

    def __init__(self, scale: ScaleVector, width: int, eps: float):
        super().__init__()
        self.scale, self.width, self.eps, self.site = scale, width, eps, ""

    def forward(self, y: Tensor) -> Tensor:
        """(..., d_out) -> (..., d_out)."""
        heads = y.unflatten(-1, (-1, self.width))
        gamma: Tensor = self.scale()
        return normalize(heads, self.eps, gamma.unflatten(-1, (-1, self.width))).flatten(-2)


def output_norm_hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Forward hook of a linear layer that has a submodule `output_norm`."""
    return cast("Tensor", cast("OutputNorm", module.output_norm)(output))
