"""Muon, and several optimizers as a single object for Lightning, schedulers and checkpoints."""

import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sv.optim.groups import is_sharded

#: Quintic Newton-Schulz coefficients a, b, c of Jordan et al. (kellerjordan.github.io/posts/muon).
NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NS_STEPS = 5
#: Lower bound of the Frobenius norm that divides the update; a zero update stays zero.
NS_EPS = 1e-7
#: Maximum number of elements of a matrix for batching with others of equal shape, and of a batch. On a CPU, batching
#: is slower for large matrices (one thread: 64 x 64 in bf16 8 times faster, 768 x 768 1.4 times slower).
STACK_MATRIX = {"cpu": 1 << 14}
STACK_MATRIX_ELSEWHERE, STACK = 1 << 24, 1 << 26


def orthogonalize(update: Tensor, dtype: torch.dtype) -> Tensor:
    """Return about U V^T of each matrix U S V^T in `update`.

    X <- a X + (b X X^T + c (X X^T)^2) X, five times, from X = update / ||update||_F. The singular values of the
    result are 0.7 to 1.2, unless those of the input are far below the largest.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024).
    Shapes: (..., m, n) -> the same; matrices along the leading axes are independent.

    Args:
        update: the matrices. A sharded matrix (FSDP2) is gathered once, iterated on every rank and sharded again,
            because products of shards would need 11 to 16 collectives per matrix. Experts are sharded along their
            axis, so each rank iterates its own
        dtype: dtype of the computation and of the result
    """
    if update.ndim == 2 and is_sharded(update):
        from torch.distributed.tensor import DTensor, distribute_tensor

        sharded = cast(DTensor, update)
        full = orthogonalize(cast(DTensor, update.to(dtype)).full_tensor(), dtype)
        return distribute_tensor(full, sharded.device_mesh, sharded.placements, src_data_rank=None)
    a, b, c = NS_COEFFICIENTS
    tall = update.shape[-2] > update.shape[-1]
    x = update.to(dtype).flatten(end_dim=-3) if update.ndim > 2 else update.to(dtype)
    add_product = torch.addmm if update.ndim == 2 else torch.baddbmm  # baddbmm is slower for one matrix
    if tall:
        x = x.mT
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=NS_EPS)
    for _ in range(NS_STEPS):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).reshape(update.shape)


def stacks(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of parameters to orthogonalize as one batch: small ones of equal shape, others alone."""
    pending: dict[tuple[torch.Size, torch.device], list[Tensor]] = {}
    for parameter in parameters:
        n = parameter.numel()
        small = n <= STACK_MATRIX.get(parameter.device.type, STACK_MATRIX_ELSEWHERE)
        if parameter.ndim != 2 or not small or is_sharded(parameter):
            yield [parameter]
            continue
        stack = pending.setdefault((parameter.shape, parameter.device), [])
        stack.append(parameter)
        if (len(stack) + 1) * n > STACK:
            yield pending.pop((parameter.shape, parameter.device))
    yield from pending.values()


class Muon(Optimizer):
    """torch.optim.Muon(adjust_lr_fn="match_rms_adamw") with support for experts, other dtypes and shards.

    M <- mu M + (1 - mu) G;  W <- (1 - lr wd) W - lr 0.2 sqrt(max(m, n)) NS((1 - mu) G + mu M)

    Source: arXiv:2502.16982, Section 2.2; M is (1 - mu) times theirs, which does not change NS.
    Shapes: parameters (..., m, n); matrices along the leading axes (experts) are updated independently.

    Args:
        groups: param_groups, each with its `weight_decay`
        lr: learning rate of all groups
        momentum: mu of the Nesterov momentum
        ns_dtype: dtype of the orthogonalization, one of `NS_DTYPES`
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, momentum: float, ns_dtype: str):
        super().__init__(groups, {"lr": lr, "momentum": momentum, "ns_dtype": ns_dtype})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for batch in stacks([p for p in group["params"] if p.grad is not None]):
                updates = []
                for parameter in batch:
                    state, grad = self.state[parameter], cast(Tensor, parameter.grad)
                    if not state:
                        state["momentum_buffer"] = torch.zeros_like(grad)
                    average = state["momentum_buffer"].lerp_(grad, 1 - momentum)
                    updates.append(grad.lerp(average, momentum))
                dtype = getattr(torch, group["ns_dtype"])
                if len(updates) > 1:
                    updates = list(orthogonalize(torch.stack(updates), dtype))
                else:
                    updates = [orthogonalize(updates[0], dtype)]
                for parameter, update in zip(batch, updates, strict=True):
                    parameter.mul_(1 - lr * group["weight_decay"])
                    parameter.add_(update, alpha=-lr * (0.2 * math.sqrt(max(parameter.shape[-2:]))))


class CompositeOptimizer(Optimizer):
    """One optimizer whose groups are updated by different optimizers.

    The parts have no groups and no state of their own; they share this object's dicts. Values written by a
    scheduler or restored from a checkpoint are therefore used by the parts.

    Args:
        parts: optimizers of disjoint parameters; their groups are concatenated in this order
    """

    def __init__(self, parts: list[Optimizer]):
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._link()

    def _link(self) -> None:
        for group in self.param_groups:
            if "betas" in group:  # LearningRateMonitor reads one name in all groups; older checkpoints lack it
                group.setdefault("momentum", group["betas"][0])
        groups = iter(self.param_groups)
        for part in self.parts:
            part_groups = list(islice(groups, len(part.param_groups)))
            # __setstate__ instead of an assignment, so that each part migrates checkpoints of older torch versions.
            part.__setstate__({"state": self.state, "param_groups": part_groups})
        assert not list(groups), "a group without an optimizer"

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "parts": self.parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set groups and state; called at the end of load_state_dict, unpickling and copying."""
        super().__setstate__(state)
        self._link()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step every part; parameters without a gradient do not change."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        assert sum(len(part.param_groups) for part in self.parts) == len(self.param_groups), "group added later"
        for part in self.parts:
            part.step()
        return loss
