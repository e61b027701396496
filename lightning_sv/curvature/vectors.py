"""Vectors in parameter space: tuples of tensors, never flattened into one."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Vector = tuple[Tensor, ...]


def inner(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Return <a, b> in float64, because products in float32 or float16 underflow and overflow."""
    products = []
    for x, y in zip(a, b, strict=True):
        flat_x = x.detach().flatten().double()
        flat_y = y.detach().flatten().double()
        products.append(torch.dot(flat_x, flat_y))
    return torch.stack(products).sum().item()


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
    signs = []
    for x in like:
        bits = torch.randint(0, 2, x.shape, generator=generator, device=generator.device)
        signs.append((2 * bits - 1).to(x))
    return tuple(signs)


def gaussian(like: Sequence[Tensor], generator: torch.Generator) -> Vector:
    """Return independent standard normals, sampled in float32 on the generator's device."""
    device = generator.device
    normals = []
    for x in like:
        sample = torch.randn(x.shape, generator=generator, device=device, dtype=torch.float32)
        normals.append(sample.to(x))
    return tuple(normals)


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
        return self._shaped([rows[i] for rows in self._rows])

    def _shaped(self, flat: list[Tensor]) -> Vector:
        """Return a vector of flat tensors in the shapes of the parameters."""
        return tuple(x.view(shape) for x, shape in zip(flat, self._shapes, strict=True))

    def reject(self, vector: Sequence[Tensor]) -> Vector:
        """Return the component of the vector orthogonal to the basis.

        Classical Gram-Schmidt, applied twice, is orthogonal up to rounding (Giraud et al. 2005).
        """
        flat = [x.detach().flatten() for x in vector]
        if self._n > 0:
            flat = self._reject_once(flat)
            flat = self._reject_once(flat)
        return self._shaped(flat)

    def _reject_once(self, flat: list[Tensor]) -> list[Tensor]:
        """Subtract Q Q^T x, with the coefficients Q^T x summed over the parameters."""
        bases = [rows[: self._n] for rows in self._rows]
        products = [q @ x for q, x in zip(bases, flat, strict=True)]
        along = torch.stack(products).sum(0)  # (n,)
        remainders = []
        for q, x in zip(bases, flat, strict=True):
            remainders.append(torch.addmv(x, q.T, along.to(x.dtype), alpha=-1))
        return remainders

    def append(self, vector: Sequence[Tensor], length: float) -> None:
        """Add vector / length, which must be a unit vector orthogonal to the basis."""
        for rows, x in zip(self._rows, vector, strict=True):
            torch.div(x.flatten(), length, out=rows[self._n])
        self._n += 1
