"""Hessian-vector products on a retained graph.

The Hessian of N parameters has N^2 entries; a product with it costs about as much as a gradient:

    H v = d/dtheta <grad L(theta), v>

It is one backward pass through the gradient's graph, which is kept, and needs second derivatives of
every operation. Vectors have the shapes of the parameters and are never flattened into one.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_sv.curvature.vectors import Vector
from lightning_sv.errors import ConfigError, expect

#: Fragments of torch's errors for operations without a second derivative.
_NO_SECOND_DERIVATIVE = ("is not implemented", "double backward")
_CHANGED = (
    "the model has changed since HessianProduct was built, for instance by an optimizer step; "
    "build a new one."
)


@dataclass(frozen=True)
class Estimate:
    """An estimate with its error and cost.

    Attributes:
        value: the estimate
        error: residual bound of an eigenvalue (`lanczos`), standard error of a mean (`hutchinson`)
        n_matvecs: number of Hessian-vector products used, shared by estimates of one run
    """

    value: float
    error: float
    n_matvecs: int


class Product(Protocol):
    """A symmetric linear map on vectors with the shapes of `parameters`."""

    parameters: Vector

    def __call__(self, vector: Sequence[Tensor]) -> Vector:
        """Apply the map."""
        ...


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """Enable second derivatives inside the context: math SDPA, no compiled code, gradients on.

    torch has no second derivative of its fused attention kernels (pytorch issue 116350), nor of
    compiled graphs; compiled modules run eagerly inside the context.
    """
    eager = torch.compiler.set_stance("force_eager")
    math_attention = sdpa_kernel(SDPBackend.MATH)
    with eager, math_attention, torch.enable_grad():
        yield


class HessianProduct:
    """v -> H v, with H the Hessian of the loss in the given parameters, exact up to rounding.

    H v = d/dtheta <grad L, v> (Pearlmutter 1994). The constructor computes loss and gradient once,
    under `twice_differentiable`; every product is one more backward pass through their graph, which
    is kept with all its saved tensors as long as this object.

    Args:
        loss: closure that computes the scalar loss from the current parameters, in nats per token
            for results in nats. Disable dropout, or the results are those of one random mask
        parameters: the subset, in any order; parameters that the loss does not use have zero
            curvature

    Raises:
        ConfigError: no parameters or one of them twice, a loss that is not a scalar or has no
            gradient, an operation without second derivative, or, in a product, a model that has
            changed

    The Hessian of L = x^T A x / 2 is A:

    >>> A = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
    >>> x = torch.tensor([5.0, -7.0], requires_grad=True)
    >>> product = HessianProduct(lambda: x @ A @ x / 2, [x])
    >>> v = torch.tensor([1.0, 10.0])
    >>> (Hv,) = product([v])
    >>> torch.equal(Hv, A @ v)
    True
    """

    def __init__(self, loss: Callable[[], Tensor], parameters: Sequence[Tensor]):
        self.parameters = _subset(parameters)
        with twice_differentiable():
            self._gradient = _gradient(loss, self.parameters)
        if _has_dead_end(self._gradient):
            raise ConfigError("the loss has a once_differentiable function; replace it.")
        self._version_of = {p: p._version for p in self.parameters}

    def subset(self, parameters: Sequence[Tensor]) -> "HessianProduct":
        """Return the product for a part of the subset, on the same graph.

        Raises:
            ConfigError: no parameters, or parameters outside this subset
        """
        part = _subset(parameters)
        gradient_of = dict(zip(self.parameters, self._gradient, strict=True))
        if not gradient_of.keys() >= set(part):
            expected = "a part of it, or a new product"
            raise ConfigError(f"parameters has tensors outside this subset; expected {expected}.")
        product = copy.copy(self)
        product.parameters = part
        product._gradient = tuple(gradient_of[p] for p in part)
        return product

    def __call__(self, vector: Sequence[Tensor]) -> Vector:
        """Return H v, shaped as the parameters."""
        # Autograd checks the tensors that its graph has saved: biases and embeddings are not.
        if any(p._version != self._version_of[p] for p in self.parameters):
            raise ConfigError(_CHANGED)
        outputs = []
        weights = []
        for gradient, v in zip(self._gradient, vector, strict=True):
            if gradient.requires_grad:  # else it is constant: its rows of H are zero
                outputs.append(gradient)
                weights.append(v)
        if not outputs:
            return tuple(map(torch.zeros_like, self.parameters))

        with _explained(), twice_differentiable():
            # activation checkpointing computes parts of the loss again
            product = torch.autograd.grad(
                outputs,
                self.parameters,
                weights,
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
        return _dense(product)


@contextmanager
def _explained() -> Iterator[None]:
    """Replace torch's error of a product by one that says what to do.

    torch raises RuntimeError for all of them, so only the message tells them apart.

    Raises:
        ConfigError: the model has changed, or an operation has no second derivative
        RuntimeError: any other error of torch
    """
    try:
        yield
    except RuntimeError as error:
        message = str(error)
        if "modified by an inplace" in message:
            raise ConfigError(_CHANGED) from error
        if any(fragment in message for fragment in _NO_SECOND_DERIVATIVE):
            found = f"an operation without second derivative ({error})"
            raise ConfigError(f"the loss has {found}; replace it.") from error
        raise


def _subset(parameters: Sequence[Tensor]) -> Vector:
    if isinstance(parameters, Tensor):
        expected = "a sequence of tensors, such as [tensor]."
        raise ConfigError(f"parameters is a tensor; expected {expected}")
    subset = tuple(parameters)
    expect(len(subset) > 0, "parameters", "empty", "at least one tensor.")
    if len(set(subset)) < len(subset):
        raise ConfigError("parameters has a duplicate tensor; expected each once.")
    return subset


def scalar_loss(loss: object) -> Tensor:
    """Return the loss; raise ConfigError if it is not a tensor with one entry."""
    if not isinstance(loss, Tensor):
        raise ConfigError(f"the loss is of type {type(loss).__name__}; expected a scalar tensor.")
    is_scalar = loss.numel() == 1
    expect(is_scalar, "the loss", f"a tensor of shape {tuple(loss.shape)}", "a scalar tensor.")
    return loss


def _gradient(loss: Callable[[], Tensor], parameters: Vector) -> Vector:
    """Return the gradient with its graph."""
    value = scalar_loss(loss())
    if not value.requires_grad:
        hint = "compute it from parameters, without detach() and inference_mode."
        raise ConfigError(f"the loss has no gradient; {hint}")
    gradient = torch.autograd.grad(
        value,
        parameters,
        create_graph=True,
        allow_unused=True,
        materialize_grads=True,
    )
    return _dense(gradient)


def _dense(gradient: Vector) -> Vector:
    """Return the tensors with all their entries, also those of nn.Embedding(sparse=True)."""
    return tuple(g.to_dense() for g in gradient)


def _has_dead_end(gradient: Vector) -> bool:
    """Return True if torch would drop second derivatives silently, at an error node."""
    seen: set[Node] = set()
    pending = [g.grad_fn for g in gradient]
    while pending:
        node = pending.pop()
        if node is None or node in seen:  # None: a constant
            continue
        seen.add(node)
        if node.name().endswith("::Error"):
            return True
        pending += [after for after, _ in node.next_functions]
    return False
