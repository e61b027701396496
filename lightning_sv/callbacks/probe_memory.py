"""Memory of a curvature probe, measured on tensors without storage."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_sv.callbacks.curvature_batch import parameter_subsets
from lightning_sv.curvature import HessianProduct
from lightning_sv.curvature.vectors import Basis, dimension
from lightning_sv.nn import Backbone, next_token_loss
from lightning_sv.nn.allocated import AllocatedBytes
from lightning_sv.scale.eager import unchunked

#: usable share of a GPU's memory
_USABLE = 0.9
#: bytes per parameter in training: weight, gradient and two moments
_STATE = 16


def probe_bytes(
    meta: Backbone, shape: Sequence[int], subsets: Sequence[str], lanczos_steps: int, *, exact: bool
) -> int:
    """Return the peak memory of a probe in bytes: the copy, the graph, a product and the Lanczos basis.

    Args:
        meta: backbone of the copy, without storage; it is modified
        shape: (sequences, tokens) of the batch
        subsets: names, see `parameter_subsets`
        lanczos_steps: number of basis vectors
        exact: if True, products use the graph of the gradient, else differences of gradients
    """
    counter = AllocatedBytes()
    with FakeTensorMode(allow_non_fake_inputs=True), counter, unchunked():
        model = meta.to_empty(device="cpu")
        tokens = torch.zeros(*shape, dtype=torch.long)

        def loss() -> Tensor:
            return next_token_loss(model(tokens), tokens)

        known = parameter_subsets(model)
        largest = max((known[name] for name in subsets), key=dimension)
        together = {id(p): p for name in subsets for p in known[name]}
        product = HessianProduct(loss, tuple(together.values())).subset(largest) if exact else None
        basis = Basis(largest, lanczos_steps)
        n = 3 if exact else 5  # start, product and remainder; for differences also the parameters and a gradient
        vectors = [tuple(map(torch.empty_like, largest)) for _ in range(n)]
        if product is not None:
            image = product(vectors[0])
        else:
            image = torch.autograd.grad(loss(), largest, allow_unused=True, materialize_grads=True)
        del basis, vectors, image
    return counter.peak


def free_bytes(device: torch.device, module: nn.Module) -> int | None:
    """Return the bytes available next to the training state; None without a GPU."""
    if device.type != "cuda":
        return None
    state = _STATE * sum(getattr(p, "_local_tensor", p).numel() for p in module.parameters())
    taken = max(state, torch.cuda.memory_allocated(device))
    return int(_USABLE * torch.cuda.get_device_properties(device).total_memory) - taken
