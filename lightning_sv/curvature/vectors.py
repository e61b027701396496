"""Vectors in parameter space: tuples of tensors, never flattened into one."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

Vector = tuple[Tensor, ...]


def inner(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Return <a, b> in float64, because products in float32 or float16 underflow and overflow."""
    products = []
    for x, y in zip(a, b, strict=True):
        products.append(torch.dot(_flat_double(x), _flat_double(y)))
    return torch.stack(products).sum().item()


def _flat_double(x: Tensor) -> Tensor:
    return x.detach().flatten().double()


def norm(a: Sequence[Tensor]) -> float:
    """Return the Euclidean norm of a."""
    return math.sqrt(inner(a, a))


def size(a: Sequence[Tensor]) -> int:
    """Return the number of entries of a."""
    return sum(x.numel() for x in a)


def rounding(a: Sequence[Tensor]) -> float:
    """Return the largest machine epsilon among the tensors of a."""
    return max(torch.finfo(x.dtype).eps for x in a)


def seeded(generator: torch.Generator | None) -> torch.Generator:
    """Return the given generator, or a CPU generator with seed 0."""
    return torch.Generator().manual_seed(0) if generator is None else generator


def rademacher(like: Sequence[Tensor], generator: torch.Generator) -> Vector:
    """Return independent signs, sampled on the generator's device.

    They do not depend on the machine for a CPU generator.
    """
    return tuple(_signs(x, generator) for x in like)


def _signs(like: Tensor, generator: torch.Generator) -> Tensor:
    bits = torch.randint(0, 2, like.shape, generator=generator, device=generator.device)
    return (2 * bits - 1).to(like)


def gaussian(like: Sequence[Tensor], generator: torch.Generator) -> Vector:
    """Return independent standard normals, sampled in float32 on the generator's device."""
    return tuple(_normals(x, generator) for x in like)


def _normals(like: Tensor, generator: torch.Generator) -> Tensor:
    device = generator.device
    sample = torch.randn(like.shape, generator=generator, device=device, dtype=torch.float32)
    return sample.to(like)


class Basis:
    """Up to n_max orthonormal vectors, as one (n_max, numel) matrix per parameter."""

    def __init__(self, like: Sequence[Tensor], n_max: int):
        self._rows = [x.new_empty(n_max, x.numel()) for x in like]
        self._shapes = [x.shape for x in like]
        self._n = 0

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, index: int) -> Vector:
        i = range(self._n)[index]  # from the end if negative
        return tuple(rows[i].view(shape) for rows, shape in self._with_shapes(self._rows))

    def _with_shapes(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, torch.Size]]:
        return zip(tensors, self._shapes, strict=True)

    def reject(self, vector: Sequence[Tensor]) -> Vector:
        """Return the component of the vector orthogonal to the basis.

        Classical Gram-Schmidt, applied twice, is orthogonal up to rounding (Giraud et al. 2005).
        """
        flat = [x.detach().flatten() for x in vector]
        if self._n:
            flat = self._reject_once(self._reject_once(flat))
        return tuple(x.view(shape) for x, shape in self._with_shapes(flat))

    def _reject_once(self, flat: list[Tensor]) -> list[Tensor]:
        """Subtract Q Q^T x, with the coefficients Q^T x summed over the parameters."""
        bases = [rows[: self._n] for rows in self._rows]
        products = [q @ x for q, x in zip(bases, flat, strict=True)]
        along = torch.stack(products).sum(0)  # (n,)
        return [
            torch.addmv(x, q.T, along.to(x.dtype), alpha=-1)
            for q, x in zip(bases, flat, strict=True)
        ]

    def append(self, vector: Sequence[Tensor], length: float) -> None:
        """Add vector / length, which must be a unit vector orthogonal to the basis."""
        for rows, x in zip(self._rows, vector, strict=True):
            torch.div(x.flatten(), length, out=rows[self._n])
        self._n += 1
