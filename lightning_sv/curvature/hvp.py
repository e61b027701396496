"""Hessian-vector products: exact on a retained graph, or by differences of gradients."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_sv.curvature.vectors import Vector, norm, rounding
from lightning_sv.errors import ConfigError

#: how torch says that a part of the graph cannot be differentiated a second time
_NO_SECOND_DERIVATIVE = ("is not implemented", "double backward")


@dataclass(frozen=True)
class Estimate:
    """A figure, the error it is believed to, and what it cost.

    Attributes:
        value: the estimate itself
        error: residual bound of an eigenvalue (`lanczos`), standard error of a mean (`hutchinson`)
        products: Hessian-vector products spent; figures of one run share them
    """

    value: float
    error: float
    products: int


class Product(Protocol):
    """A symmetric linear map on vectors that are shaped as `parameters`."""

    @property
    def parameters(self) -> Vector:
        """The tensors that span the space; only shape, dtype and device are read."""
        ...

    def __call__(self, vector: Sequence[Tensor]) -> Vector:
        """Apply the map."""
        ...


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """Run what is inside with second derivatives: math SDPA, no compiled code, gradients on.

    torch has no second derivative of its fused attention kernels (pytorch issue 116350), nor of
    compiled graphs; a module that was compiled runs eagerly inside.

    Raises:
        ConfigError: called from code that is being compiled
    """
    if torch.compiler.is_compiling():
        raise ConfigError("twice_differentiable() was entered in code under torch.compile; enter it outside.")
    with torch.compiler.set_stance("force_eager"), sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
        yield


class HessianProduct:
    """v -> H v, H the Hessian of the loss in the parameters given, exact up to rounding.

    H v = d/dtheta <grad L, v> (Pearlmutter 1994). Loss and gradient are computed once, here, under
    `twice_differentiable`; every product is one more backward through their graph, which lives, with
    all that it saved, as long as this object.

    Args:
        loss: builds the loss, a scalar, from the parameters' present values; in nats per token for
            the figures to be. No dropout, or the figures are those of one draw of it
        parameters: the subset, in any order; a parameter that the loss does not use has zero curvature

    Raises:
        ConfigError: no parameters, a loss that is no scalar or has no gradient, an operation without
            second derivative, or, at a product, a model that changed since
    """

    def __init__(self, loss: Callable[[], Tensor], parameters: Sequence[Tensor]):
        self.parameters = _subset(parameters)
        with twice_differentiable():
            self._gradient = _gradient(loss, self.parameters, create_graph=True)
        if _has_dead_end(self._gradient):
            raise ConfigError(
                "the loss has an autograd function marked once_differentiable; replace it, or use DifferenceProduct."
            )

    def subset(self, parameters: Sequence[Tensor]) -> "HessianProduct":
        """Return the product in a part of the subset, on the same graph: no second forward and gradient.

        Raises:
            ConfigError: parameters that this subset does not have, or none
        """
        part, gradient = _subset(parameters), {id(p): g for p, g in zip(self.parameters, self._gradient, strict=True)}
        if any(id(p) not in gradient for p in part):
            raise ConfigError("the part has parameters that the subset does not have; build another HessianProduct.")
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
            return torch.autograd.grad(
                outputs, self.parameters, weights, retain_graph=True, allow_unused=True, materialize_grads=True
            )
        except RuntimeError as error:
            if "modified by an inplace" in str(error):
                raise ConfigError(
                    "the model has changed since HessianProduct was built (an optimizer step, or a DifferenceProduct, "
                    "which moves the parameters?); build another."
                ) from error
            if not any(sign in str(error) for sign in _NO_SECOND_DERIVATIVE):
                raise
            raise ConfigError(
                f"the loss has an operation without second derivative ({error}); replace it, or use DifferenceProduct."
            ) from error


class DifferenceProduct:
    """v -> (grad L(theta + h v) - grad L(theta - h v)) / 2h: H v where no second derivative exists.

    Two forward and backward passes a product, and the memory of one beside three copies of the subset.
    The loss runs as it is, so with flash attention and compiled. What it draws, as dropout does, is drawn
    alike in every pass, from the random state of when this object was made; that state stays as it is. The
    displacement's norm is ||h v|| = step (1 + ||theta||): truncation grows as step^2, most along the sharpest
    directions, and the gradients' rounding as 1 / step. The parameters are moved in place and put back
    exactly; in-place changes end the retained graph of a HessianProduct of the same model.

    Not quite symmetric nor linear in v: errors of `lanczos` and `hutchinson` do not include that.

    Args:
        loss: as in `HessianProduct`
        parameters: in which the loss is differentiated twice
        step: relative size of the displacement; None for eps^(1/3) / 5 with eps the parameters' rounding
            (1e-3 in float32, where on a tiny Llama H v is right to 2e-3 and lambda_max to 6e-4)

    Raises:
        ConfigError: as in `HessianProduct`, or a step that is not positive
    """

    def __init__(self, loss: Callable[[], Tensor], parameters: Sequence[Tensor], step: float | None = None):
        self.parameters = _subset(parameters)
        if step is None:
            step = rounding(self.parameters) ** (1 / 3) / 5
        if step <= 0:
            raise ConfigError(f"step of DifferenceProduct is {step}; it must be positive.")
        self.loss, self.step = loss, step
        self._devices = sorted({p.device.index or 0 for p in self.parameters if p.is_cuda})
        self._drawn = torch.get_rng_state(), [torch.cuda.get_rng_state(device) for device in self._devices]

    def __call__(self, vector: Sequence[Tensor]) -> Vector:
        """Return H v, shaped as the parameters."""
        _check_shapes(vector, self.parameters)
        length = norm(vector)
        if length == 0:
            return tuple(torch.zeros_like(p) for p in self.parameters)
        h = self.step * (1 + norm(self.parameters)) / length
        ahead, behind = self._gradient_at(h, vector), self._gradient_at(-h, vector)
        return tuple((a - b) / (2 * h) for a, b in zip(ahead, behind, strict=True))

    def _gradient_at(self, h: float, vector: Sequence[Tensor]) -> Vector:
        here = [p.detach().clone() for p in self.parameters]
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
                for parameter, value in zip(self.parameters, here, strict=True):
                    parameter.copy_(value)


def _subset(parameters: Sequence[Tensor]) -> Vector:
    subset = tuple(parameters)
    if not subset:
        raise ConfigError("the subset has no parameters; give at least one.")
    if len({id(p) for p in subset}) < len(subset):
        raise ConfigError("the subset has a parameter twice; give each once.")
    if frozen := [i for i, p in enumerate(subset) if not p.requires_grad]:
        raise ConfigError(f"parameters {frozen} of the subset do not require gradients; leave them out.")
    return subset


def _check_shapes(vector: Sequence[Tensor], parameters: Vector) -> None:
    if len(vector) != len(parameters):
        raise ConfigError(
            f"the vector has {len(vector)} tensors and there are {len(parameters)} parameters; give one each."
        )
    for i, (tensor, parameter) in enumerate(zip(vector, parameters, strict=True)):
        if tensor.shape != parameter.shape:
            raise ConfigError(
                f"tensor {i} of the vector has shape {tuple(tensor.shape)}; its parameter has {tuple(parameter.shape)}."
            )


def _gradient(loss: Callable[[], Tensor], parameters: Vector, *, create_graph: bool) -> Vector:
    value = loss()
    if value.numel() != 1:
        raise ConfigError(f"the loss has shape {tuple(value.shape)}; it must be a scalar.")
    if not value.requires_grad:
        raise ConfigError(
            "the loss has no gradient; compute it from the parameters, undetached and outside inference_mode."
        )
    return torch.autograd.grad(value, parameters, create_graph=create_graph, allow_unused=True, materialize_grads=True)


def _has_dead_end(gradient: Vector) -> bool:
    """Whether torch would drop second derivatives silently: its error node has no edges, and so is never run."""
    todo = {g.grad_fn for g in gradient if g.grad_fn is not None}
    seen: set[torch.autograd.graph.Node] = set()
    while todo:
        node = todo.pop()
        if node.name().endswith("::Error"):
            return True
        seen.add(node)
        todo |= {after for after, _ in node.next_functions if after is not None} - seen
    return False
