"""Relative size of an optimizer step, per role and per branch."""

from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_sv.callbacks.branches import (
    BranchCallback,
    means_over_layers,
    of_one_head,
    scaled_branches,
)
from lightning_sv.callbacks.measuring import measuring
from lightning_sv.callbacks.run_state import was_skipped
from lightning_sv.callbacks.tensorboard_layout import (
    BRANCH_PAGES,
    BranchCurve,
    Pages,
    add_curve,
    branch_curves,
)
from lightning_sv.optim import PARAMETER_ROLES, full_tensor
from lightning_sv.scale import OriginalSpaceScale

#: name of a measurement -> tensors that change together
Tensors = dict[str, tuple[Tensor, ...]]
_KINDS = ("W", "gamma_in", "gamma_out", "alpha_in", "alpha_out")


def branch_tensors(model: nn.Module) -> Tensors:
    """Return W, gamma and, under `or`, alpha of every branch, keyed 'layer0/q_proj/W'.

    gamma is computed from its parameters. The alpha of `er` is left out: it is a logarithm, whose
    change is already relative to gamma. A collective for sharded vectors.
    """
    tensors: Tensors = {}
    for branch in scaled_branches(model):
        if branch.weight is not None:
            tensors[f"{branch.name}/W"] = (branch.weight,)
        for side, gamma in branch.gammas().items():
            tensors[f"{branch.name}/gamma_{side}"] = (gamma,)
        for side, vector in branch.vectors.items():
            own = of_one_head(vector)
            if isinstance(own, OriginalSpaceScale):
                tensors[f"{branch.name}/alpha_{side}"] = (own.alpha,)
    return tensors


def role_tensors(trainer: L.Trainer) -> Tensors:
    """Return the parameters of each role, keyed 'role/matrix'; empty without roles."""
    tensors: Tensors = {}
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            if "role" not in group:
                continue
            key = f"role/{group['role']}"
            earlier = tensors.get(key, ())
            tensors[key] = (*earlier, *group["params"])
    return tensors


def relative_changes(before: Tensors, after: Tensors) -> dict[str, Tensor]:
    """Return ||after - before|| / ||before|| of each measurement, over all entries.

    Omit those with ||before|| = 0, such as the parameters of `offset` and `er` before the first
    step. A collective if sharded.
    """
    changes: dict[str, Tensor] = {}
    for key, earlier in before.items():
        size = _norm([_wide(then) for then in earlier])
        if size == 0:
            continue
        pairs = zip(after[key], earlier, strict=True)
        changes[key] = _norm([_wide(now) - _wide(then) for now, then in pairs]) / size
    return changes


def _wide(tensor: Tensor) -> Tensor:
    """Return at least float32, because bf16 would round the difference."""
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    norms = [full_tensor(torch.linalg.vector_norm(tensor)).double() for tensor in tensors]
    return torch.linalg.vector_norm(torch.stack(norms))


def copied(groups: Tensors) -> Tensors:
    """Return copies of the tensors; one in several groups is copied once."""
    copies: dict[int, Tensor] = {}  # a matrix belongs to a role and to a branch
    result: Tensors = {}
    for key, tensors in groups.items():
        for tensor in tensors:
            if id(tensor) not in copies:
                copies[id(tensor)] = tensor.detach().clone()
        result[key] = tuple(copies[id(tensor)] for tensor in tensors)
    return result


class RelativeSteps(BranchCallback):
    """Log ||change|| / ||value|| of one optimizer step under relative_step/.

    role/ROLE: all parameters of a role, such as matrix, embedding or input. layer0/q_proj/W,
    gamma_in and alpha_in: of a branch; mean/q_proj/... averages over layers. With weight decay
    included. Under `dnp` the function does not depend on the norm of W, and under `or` not on that
    of alpha, so there it is the effective learning rate (arXiv:1706.05350). A skipped step is not
    logged. A step from values that are all 0 has no relative size, and is not logged either.

    Roles measure parameters as they are stored: gamma - 1 under `offset`, logarithms under `er`.
    Both start at 0, so their relative step says little; read that of gamma.

    While a measured step runs, the callback keeps a copy of the parameters.

    Args:
        every_n_steps: optimizer steps between two measured steps
        model: dotted name of the submodule with the scale vectors; null to find it

    Raises:
        ConfigError: every_n_steps is below 1
    """

    tag = "relative_step"

    def __init__(self, every_n_steps: int = 100, model: str | None = None):
        super().__init__(every_n_steps, model)
        self._before: Tensors = {}

    def charts(self) -> Pages:
        """Return a chart of the roles, and one per group of branches and kind of tensor."""
        roles = [f"{self.tag}/role/{role}" for role in PARAMETER_ROLES]
        pages: Pages = {"steps": {"relative step of each role": roles}}
        placeholders = dict.fromkeys(branch_tensors(self._model), torch.zeros(()))
        curves = branch_curves(means_over_layers(placeholders))
        for curve in sorted(curves, key=_chart_order):
            chart = f"relative step, {curve.page}: {curve.figure}"
            add_curve(pages, "steps", chart, f"{self.tag}/{curve.key}")
        return pages

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock; before the first step there is nothing to compare."""
        self._before = {}
        super().on_train_start(trainer, pl_module)

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any
    ) -> None:
        """Copy the parameters if the step will be measured, before the first optimizer steps."""
        if self._before or not self._clock.is_due(trainer.global_step + 1):
            return
        with torch.no_grad(), measuring(trainer):
            self._before = copied(self._tensors(trainer))

    def _tensors(self, trainer: L.Trainer) -> Tensors:
        return role_tensors(trainer) | branch_tensors(self._model)

    def act(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Write the changes since `on_before_optimizer_step`, unless the step was skipped."""
        before = self._before
        self._before = {}
        if not before or was_skipped(pl_module):
            return
        with torch.no_grad(), measuring(trainer):
            changes = relative_changes(before, self._tensors(trainer))
            changes |= means_over_layers(changes)
        self.write(trainer, changes)


def _chart_order(curve: BranchCurve) -> tuple[int, int]:
    """Sort key: the group of branches, then the kind of tensor."""
    return list(BRANCH_PAGES).index(curve.page), _KINDS.index(curve.figure)
