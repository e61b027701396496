"""Hessian-vector products: exact on a retained graph, or by differences of gradients."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_sv.curvature.vectors import Vector, norm, rounding
from lightning_sv.errors import ConfigError, expect

#: Fragments of torch's errors for operations without a second derivative.
_NO_SECOND_DERIVATIVE = ("is not implemented", "double backward")


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
    """A symmetric linear map on vectors with the shapes of `parameters`, of which shape, dtype and device are used."""

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
    with torch.compiler.set_stance("force_eager"), sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
        yield


class HessianProduct:
    """v -> H v, with H the Hessian of the loss in the given parameters, exact up to rounding.

    H v = d/dtheta <grad L, v> (Pearlmutter 1994). The constructor computes loss and gradient once, under
    `twice_differentiable`; every product is one more backward pass through their graph, which is kept with
    all its saved tensors as long as this object.

    Args:
        loss: closure that computes the scalar loss from the current parameters, in nats per token for
            results in nats. Disable dropout, or the results are those of one random mask
        parameters: the subset, in any order; parameters that the loss does not use have zero curvature

    Raises:
        ConfigError: no parameters, a loss that is not a scalar or has no gradient, an operation without
            second derivative, or, in a product, a model that has changed
    """

    def __init__(self, loss: Callable[[], Tensor], parameters: Sequence[Tensor]):
        self.parameters = _subset(parameters)
        with twice_differentiable():
            self._gradient = _gradient(loss, self.parameters, create_graph=True)
        if _has_dead_end(self._gradient):
            raise ConfigError("the loss has a once_differentiable function; replace it, or use DifferenceProduct.")

    def subset(self, parameters: Sequence[Tensor]) -> "HessianProduct":
        """Return the product for a part of the subset, on the same graph.

        Raises:
            ConfigError: no parameters, or parameters outside this subset
        """
        part, gradient = _subset(parameters), {id(p): g for p, g in zip(self.parameters, self._gradient, strict=True)}
        if any(id(p) not in gradient for p in part):
            raise ConfigError("parameters has tensors outside this subset; expected a part of it, or a new product.")
        product = copy.copy(self)
        product.parameters, product._gradient = part, tuple(gradient[id(p)] for p in part)
        return product

    def __call__(self, vector: Sequence[Tensor]) -> Vector:
        """Return H v, shaped as the parameters."""
        _check_shapes(vector, self.parameters)
        # A gradient without history is constant: its rows of H are zero.
        live = [(g, v) for g, v in zip(self._gradient, vector, strict=True) if g.requires_grad]
        if not live:
            return tuple(torch.zeros_like(p) for p in self.parameters)
        outputs, weights = zip(*live, strict=True)
        try:
            with twice_differentiable():  # activation checkpointing computes parts of the loss again
                product = torch.autograd.grad(
                    outputs, self.parameters, weights, retain_graph=True, allow_unused=True, materialize_grads=True
                )
        except RuntimeError as error:
            if "modified by an inplace" in str(error):
                since = "since HessianProduct was built, by an optimizer step or a DifferenceProduct"
                raise ConfigError(f"the model has changed {since}; build a new one.") from error
            if not any(sign in str(error) for sign in _NO_SECOND_DERIVATIVE):
                raise
            operation = f"an operation without second derivative ({error})"
            raise ConfigError(f"the loss has {operation}; replace it, or use DifferenceProduct.") from error
        return _dense(product)


class DifferenceProduct:
    """v -> (grad L(theta + h v) - grad L(theta - h v)) / 2h: H v without second derivatives.

    A product takes two forward and backward passes, and the memory of one in addition to three copies of the subset.
    The loss runs unchanged, for instance with flash attention and compiled. Random numbers, such as dropout masks, are
    the same in every pass: they start from the random state at construction, and the current state is restored. The
    largest displacement of an entry is h max|v| = step (1 + ||theta||) / sqrt(N), with N parameters, so that directions
    of few entries are not displaced further than others. The truncation error grows as step^2, most along the
    sharpest directions, and the rounding error of the gradients as 1 / step. The parameters are changed in place and
    restored exactly; these changes invalidate the retained graph of a HessianProduct of the same model. Buffers that
    the loss changes, such as the means of BatchNorm, are not restored.

    The map is not exactly symmetric or linear in v; the error of `lanczos` includes the asymmetry, that of `hutchinson`
    does not. Kinks (ReLU, the selection of experts) and 16-bit products inside the loss, as under autocast, change the
    result.

    Args:
        loss: as in `HessianProduct`
        parameters: parameters of the second derivative
        step: relative size of the displacement; None for eps^(1/3) / 5 with eps the parameters' machine epsilon (1e-3
            in float32)

    Raises:
        ConfigError: as in `HessianProduct`, parameters narrower than float32, or a step that is not positive
    """

    def __init__(self, loss: Callable[[], Tensor], parameters: Sequence[Tensor], step: float | None = None):
        self.parameters = _subset(parameters)
        narrowest = min((p.dtype for p in self.parameters), key=lambda dtype: torch.finfo(dtype).bits)
        wanted = "float32 or wider, because 16 bits round the displacement. Use HessianProduct, or method='exact'."
        expect(torch.finfo(narrowest).bits >= 32, "the dtype of a parameter", narrowest, wanted)
        if step is None:
            step = rounding(self.parameters) ** (1 / 3) / 5
        expect(step > 0, "step of DifferenceProduct", step, "a number above 0.")
        self.loss, self.step = loss, step
        self._devices = sorted({p.device.index or 0 for p in self.parameters if p.is_cuda})
        self._drawn = torch.get_rng_state(), [torch.cuda.get_rng_state(device) for device in self._devices]

    def __call__(self, vector: Sequence[Tensor]) -> Vector:
        """Return H v, shaped as the parameters."""
        _check_shapes(vector, self.parameters)
        largest = max(float(v.abs().max()) for v in vector if v.numel())
        if largest == 0:
            return tuple(torch.zeros_like(p) for p in self.parameters)
        n = sum(p.numel() for p in self.parameters)
        h = self.step * (1 + norm(self.parameters)) / (math.sqrt(n) * largest)
        ahead, behind = self._gradient_at(h, vector), self._gradient_at(-h, vector)
        return tuple((a - b) / (2 * h) for a, b in zip(ahead, behind, strict=True))

    def _gradient_at(self, h: float, vector: Sequence[Tensor]) -> Vector:
        saved = [p.detach().clone() for p in self.parameters]
        try:
            with torch.no_grad():
                for parameter, v in zip(self.parameters, vector, strict=True):
                    parameter.add_(v, alpha=h)
            with torch.enable_grad(), torch.random.fork_rng(devices=self._devices):
                cpu, gpus = self._drawn
                torch.set_rng_state(cpu)
                for device, state in zip(self._devices, gpus, strict=True):
                    torch.cuda.set_rng_state(state, device)
                return _gradient(self.loss, self.parameters, create_graph=False)
        finally:
            with torch.no_grad():
                for parameter, value in zip(self.parameters, saved, strict=True):
                    parameter.copy_(value)


def _subset(parameters: Sequence[Tensor]) -> Vector:
    expect(not isinstance(parameters, Tensor), "parameters", "a tensor", "a sequence of tensors, such as [tensor].")
    subset = tuple(parameters)
    expect(len(subset) > 0, "parameters", "empty", "at least one tensor.")
    if len({id(p) for p in subset}) < len(subset):
        raise ConfigError("parameters has a duplicate tensor; expected each once.")
    other = next((p.dtype for p in subset if not p.is_floating_point()), None)
    expect(other is None, "the dtype of a parameter", other, "real floating-point numbers.")
    if frozen := [i for i, p in enumerate(subset) if not p.requires_grad]:
        raise ConfigError(f"parameters {frozen} of the subset do not require gradients; remove them.")
    return subset


def _check_shapes(vector: Sequence[Tensor], parameters: Vector) -> None:
    found, wanted = ([tuple(t.shape) for t in tensors] for tensors in (vector, parameters))
    expect(found == wanted, "the shape of the vector", found, f"that of the parameters, {wanted}.")


def scalar_loss(loss: object) -> Tensor:
    """Return the loss; raise ConfigError if it is not a tensor with one entry."""
    found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"of type {type(loss).__name__}"
    expect(isinstance(loss, Tensor) and loss.numel() == 1, "the loss", found, "a scalar tensor.")
    assert isinstance(loss, Tensor)
    return loss


def _gradient(loss: Callable[[], Tensor], parameters: Vector, *, create_graph: bool) -> Vector:
    value = scalar_loss(loss())
    if not value.requires_grad:
        raise ConfigError("the loss has no gradient; compute it from parameters, without detach() and inference_mode.")
    try:
        gradient = torch.autograd.grad(
            value, parameters, create_graph=create_graph, allow_unused=True, materialize_grads=True
        )
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        hint = "Use checkpoint(..., use_reentrant=False)."
        raise ConfigError(f"the loss has reentrant activation checkpointing; expected none. {hint}") from error
    return _dense(gradient)


def _dense(gradient: Vector) -> Vector:
    """Return the tensors with all their entries, also those of nn.Embedding(sparse=True)."""
    return tuple(g.to_dense() if g.is_sparse else g for g in gradient)


def _has_dead_end(gradient: Vector) -> bool:
    """Return True if torch would drop second derivatives silently, at an error node without edges."""
    pending = {g.grad_fn for g in gradient if g.grad_fn is not None}
    seen: set[torch.autograd.graph.Node] = set()
    while pending:
        node = pending.pop()
        if node.name().endswith("::Error"):
            return True
        seen.add(node)
        pending |= {after for after, _ in node.next_functions if after is not None} - seen
    return False
