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
#: Maximum number of elements of a matrix for batching with others of equal shape. On a CPU,
#: batching is slower for large matrices (one thread: 64 x 64 in bf16 8 times faster, 768 x 768 1.4
#: times slower).
STACK_MATRIX = {"cpu": 1 << 14}
STACK_MATRIX_ON_GPU = 1 << 24
#: Maximum number of elements of a batch.
STACK = 1 << 26


def orthogonalize(update: Tensor, dtype: torch.dtype) -> Tensor:
    """Return about U V^T of each matrix U S V^T in `update`.

    X <- a X + (b X X^T + c (X X^T)^2) X, five times, from X = update / ||update||_F. The singular
    values of the result are 0.7 to 1.2, unless those of the input are far below the largest.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024).
    Shapes: (..., m, n) -> the same; matrices along the leading axes are independent.

    Args:
        update: the matrices. A sharded matrix (FSDP2) is gathered once, iterated on every rank and
            sharded again, because products of shards would need 11 to 16 collectives per matrix.
            Experts are sharded along their axis, so each rank iterates its own
        dtype: dtype of the computation and of the result
    """
    if update.ndim == 2 and is_sharded(update):
        return _orthogonalize_sharded(update, dtype)

    x = update.to(dtype)
    if update.ndim > 2:
        x = x.flatten(end_dim=-3)  # (matrices, m, n)
    is_tall = update.shape[-2] > update.shape[-1]
    x = _newton_schulz(x.mT).mT if is_tall else _newton_schulz(x)
    return x.reshape(update.shape)


def _newton_schulz(x: Tensor) -> Tensor:
    """Iterate on one or several matrices (..., m, n), m <= n: X X^T is the smaller Gram matrix."""
    add_product = torch.addmm if x.ndim == 2 else torch.baddbmm  # baddbmm is slower for one
    a, b, c = NS_COEFFICIENTS
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=NS_EPS)
    for _ in range(NS_STEPS):
        gram = x @ x.mT
        polynomial = add_product(gram, gram, gram, beta=b, alpha=c)  # b G + c G^2
        x = add_product(x, polynomial, x, beta=a)
    return x


def _orthogonalize_sharded(update: Tensor, dtype: torch.dtype) -> Tensor:
    """Gather the matrix once, orthogonalize it on every rank, and shard the result."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    sharded = cast(DTensor, update)
    full = orthogonalize(cast(DTensor, update.to(dtype)).full_tensor(), dtype)
    return distribute_tensor(full, sharded.device_mesh, sharded.placements, src_data_rank=None)


def stacks(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield batches to orthogonalize at once: small matrices of equal shape, others alone."""
    pending: dict[tuple[torch.Size, torch.device], list[Tensor]] = {}
    for parameter in parameters:
        if not _can_stack(parameter):
            yield [parameter]
            continue
        key = (parameter.shape, parameter.device)
        stack = pending.setdefault(key, [])
        stack.append(parameter)
        if (len(stack) + 1) * parameter.numel() > STACK:
            yield pending.pop(key)
    yield from pending.values()


def _can_stack(parameter: Tensor) -> bool:
    limit = STACK_MATRIX.get(parameter.device.type, STACK_MATRIX_ON_GPU)
    is_small_matrix = parameter.ndim == 2 and parameter.numel() <= limit
    return is_small_matrix and not is_sharded(parameter)


class Muon(Optimizer):
    """torch.optim.Muon(adjust_lr_fn="match_rms_adamw") with experts, other dtypes and shards.

    M <- mu M + (1 - mu) G
    W <- (1 - lr wd) W - lr 0.2 sqrt(max(m, n)) NS((1 - mu) G + mu M)

    NS normalizes the momentum. A matrix whose gradient is 0, such as that of an expert without
    tokens, therefore moves on at the full rate, in the direction of its last momentum, until that
    has decayed far below `NS_EPS`: a few hundred steps at mu = 0.95.

    Source: arXiv:2502.16982, Section 2.2; M is (1 - mu) times theirs, which does not change NS.
    Shapes: parameters (..., m, n); matrices along the leading axes (experts) are updated
        independently.

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
            with_gradient = [p for p in group["params"] if p.grad is not None]
            for batch in stacks(with_gradient):
                self._update(batch, group)

    def _update(self, batch: list[Tensor], group: dict[str, Any]) -> None:
        """Update parameters of equal shape."""
        momenta = [self._nesterov(parameter, group["momentum"]) for parameter in batch]
        updates = _orthogonalize_all(momenta, getattr(torch, group["ns_dtype"]))
        for parameter, update in zip(batch, updates, strict=True):
            _apply(parameter, update, group["lr"], group["weight_decay"])

    def _nesterov(self, parameter: Tensor, momentum: float) -> Tensor:
        """Update the parameter's momentum; return (1 - mu) G + mu M."""
        grad = cast(Tensor, parameter.grad)
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        average = state["momentum_buffer"].lerp_(grad, 1 - momentum)
        return grad.lerp(average, momentum)


def _orthogonalize_all(updates: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    if len(updates) == 1:
        return [orthogonalize(updates[0], dtype)]
    return list(orthogonalize(torch.stack(updates), dtype))


def _apply(parameter: Tensor, update: Tensor, lr: float, weight_decay: float) -> None:
    rms_of_adamw = 0.2 * math.sqrt(max(parameter.shape[-2:]))
    parameter.mul_(1 - lr * weight_decay)
    parameter.add_(update, alpha=-lr * rms_of_adamw)


class CompositeOptimizer(Optimizer):
    """One optimizer whose groups are updated by different optimizers.

    The parts have no groups and no state of their own; they share this object's dicts. Values
    written by a scheduler or restored from a checkpoint are therefore used by the parts.

    Args:
        parts: optimizers of disjoint parameters; their groups are concatenated in this order
    """

    def __init__(self, parts: list[Optimizer]):
        self.parts = parts
        groups: list[dict[str, Any]] = []
        for part in parts:
            groups += part.param_groups
        super().__init__(groups, {})
        self._share_groups_and_state()

    def _share_groups_and_state(self) -> None:
        """Give each part its groups and the state of this object, as the same dicts."""
        _add_momentum(self.param_groups)
        groups = iter(self.param_groups)
        for part in self.parts:
            part_groups = list(islice(groups, len(part.param_groups)))
            # __setstate__ instead of an assignment, so that each part migrates checkpoints of older
            # torch versions.
            part.__setstate__({"state": self.state, "param_groups": part_groups})
        assert not list(groups), "a group without an optimizer"

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "parts": self.parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set groups and state; called at the end of load_state_dict, unpickling and copying."""
        super().__setstate__(state)
        self._share_groups_and_state()

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Step every part; parameters without a gradient do not change."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        n_groups = sum(len(part.param_groups) for part in self.parts)
        assert n_groups == len(self.param_groups), "group added later"
        for part in self.parts:
            part.step()
        return loss


def _add_momentum(groups: list[dict[str, Any]]) -> None:
    """Add `momentum` to the groups of Adam, which call it betas[0]; older checkpoints lack it.

    LearningRateMonitor reads one name in all groups of an optimizer.
    """
    for group in groups:
        if "betas" in group:
            group.setdefault("momentum", group["betas"][0])
