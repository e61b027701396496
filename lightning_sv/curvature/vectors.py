"""Vectors in parameter space: tuples of tensors with the parameters' shapes, never flattened into one."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Vector = tuple[Tensor, ...]


def inner(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Return <a, b> in float64, because products in float32 or float16 underflow and overflow."""
    flat = ((x.detach().flatten().double(), y.detach().flatten().double()) for x, y in zip(a, b, strict=True))
    return torch.stack([torch.dot(x, y) for x, y in flat]).sum().item()


def norm(a: Sequence[Tensor]) -> float:
    """Return the Euclidean norm of a."""
    return math.sqrt(inner(a, a))


def rounding(a: Sequence[Tensor]) -> float:
    """Return the largest machine epsilon among the tensors of a."""
    return max(torch.finfo(x.dtype).eps for x in a)


def seeded(generator: torch.Generator | None) -> torch.Generator:
    """Return the given generator, or a CPU generator with seed 0."""
    return torch.Generator().manual_seed(0) if generator is None else generator


def rademacher(like: Sequence[Tensor], generator: torch.Generator) -> Vector:
    """Return independent signs, sampled on the generator's device; machine-independent for a CPU generator."""
    device = generator.device
    return tuple((2 * torch.randint(0, 2, x.shape, generator=generator, device=device) - 1).to(x) for x in like)


def gaussian(like: Sequence[Tensor], generator: torch.Generator) -> Vector:
    """Return independent standard normals, sampled in float32 on the generator's device."""
    device = generator.device
    return tuple(torch.randn(x.shape, generator=generator, device=device, dtype=torch.float32).to(x) for x in like)


class Basis:
    """Up to n_max orthonormal vectors, as one (n_max, numel) matrix per parameter."""

    def __init__(self, like: Sequence[Tensor], n_max: int):
        self._rows = [x.new_empty(n_max, x.numel()) for x in like]
        self._shapes = [x.shape for x in like]
        self._n = 0

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, index: int) -> Vector:
        assert index < self._n
        return tuple(rows[index].view(shape) for rows, shape in zip(self._rows, self._shapes, strict=True))

    def reject(self, vector: Sequence[Tensor]) -> Vector:
        """Return the component of the vector orthogonal to the basis.

        Classical Gram-Schmidt, applied twice, is orthogonal up to rounding (Giraud et al. 2005).
        """
        flat = [x.detach().flatten() for x in vector]
        for _ in range(2 if self._n else 0):
            rows = [r[: self._n] for r in self._rows]
            along = torch.stack([r @ x for r, x in zip(rows, flat, strict=True)]).sum(0)
            flat = [torch.addmv(x, r.T, along.to(x.dtype), alpha=-1) for r, x in zip(rows, flat, strict=True)]
        return tuple(x.view(shape) for x, shape in zip(flat, self._shapes, strict=True))

    def append(self, vector: Sequence[Tensor], length: float) -> None:
        """Add vector / length, which must be a unit vector orthogonal to the basis."""
        for rows, x in zip(self._rows, vector, strict=True):
            torch.div(x.flatten(), length, out=rows[self._n])
        self._n += 1
