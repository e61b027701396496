"""Scale vectors of each branch during a run: drift, beta, and balance with the matrix."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_sv.callbacks.branches import (
    BranchCallback,
    ScaledBranch,
    means_over_layers,
    scaled_branches,
)
from lightning_sv.callbacks.measuring import measuring
from lightning_sv.optim import full_tensor
from lightning_sv.scale.vector import HeadShared

#: side -> axis of W along which an entry of gamma has its w_j
_AXES = {"in": -2, "out": -1}


@torch.no_grad()
def scale_vector_figures(model: nn.Module) -> dict[str, Tensor]:
    """Return metrics of the scale vectors of every branch, keyed 'layer0/q_proj/drift_in'.

    Per side, in for gamma_in and out for gamma_out (with rows for columns on the output side):

    - drift: rms of gamma - gamma_0, with gamma_0 the initial value of new models: 1, or
      `initial_gamma_out`; beta, if there is one
    - imbalance: mean over columns j of |gamma_j^2 - ||w_j||^2| / (gamma_j^2 + ||w_j||^2). w_j has
      the columns of all branches and experts that share gamma. Weight decay of both keeps it small
      (paper, Section 2.2). There gamma is a parameter: the parameters of `or` and `er` are alpha
      and beta, so decay acts on other quantities. Under `dnp` a norm stands between W and
      gamma_out, so nothing balances them, and there is no imbalance of that side

    With `share_heads`, gamma_out is the vector of one head, and w_j has the rows of all heads that
    it scales. Means over experts; 'mean/...' over layers. Norms without branches have one side and
    no imbalance. A collective if weights are sharded.
    """
    branches = _scaled(model)
    out: dict[str, Tensor] = {}
    for branch in branches:
        for side, gamma in branch.gammas().items():
            for key, value in _vector_figures(gamma, branch.vectors[side]).items():
                out[f"{branch.name}/{key}_{side}"] = _mean(value)
    out |= _imbalances(branches)
    return out | means_over_layers(out)


def _vector_figures(gamma: Tensor, vector: Any) -> dict[str, Tensor]:
    """Return drift, and beta if there is one."""
    initial = getattr(vector, "initial", 1.0)  # a function that returns gamma has no such value
    figures = {"drift": (gamma.double() - initial).square().mean(-1).sqrt()}
    beta = getattr(vector, "magnitude", None)
    if beta is not None:
        figures["beta"] = full_tensor(beta)
    return figures


def _imbalances(branches: Sequence[ScaledBranch]) -> dict[str, Tensor]:
    """Return the imbalance of every side of every branch whose vector scales W directly.

    Branches that share a vector share its value.
    """
    groups: dict[tuple[str, int], list[ScaledBranch]] = defaultdict(list)
    for branch in branches:
        if branch.weight is None:
            continue
        for side, vector in branch.vectors.items():
            groups[side, id(vector)].append(branch)

    out: dict[str, Tensor] = {}
    for (side, _), group in groups.items():
        is_behind_a_norm = side == "out" and any(branch.has_output_norm for branch in group)
        if is_behind_a_norm:
            continue
        value = _imbalance(group, side)
        for branch in group:
            out[f"{branch.name}/imbalance_{side}"] = value
    return out


def _imbalance(branches: list[ScaledBranch], side: str) -> Tensor:
    """Return the imbalance of the vector that the branches share."""
    square = branches[0].gammas()[side].square()
    lengths = torch.zeros_like(square)
    for branch in branches:
        of_branch = _squared_lengths(branch.full_weight(), side, square)
        lengths = lengths + of_branch.sum_to_size(square.shape)  # over experts that share gamma
    total = square + lengths
    is_zero = total == 0  # of a column without weights and gamma, which is in balance
    return _mean((square - lengths).abs() / total.masked_fill(is_zero, 1.0))


def beta_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return |dL / d beta| of the current gradients, keyed 'layer0/q_proj/beta_in_grad'.

    Means over experts. Under `dnp` the loss does not depend on the beta of scale_in. Its gradient
    consists of rounding errors and the effect of eps, but Adam, which normalizes by its size, still
    moves it at full rate.
    """
    out: dict[str, Tensor] = {}
    for branch in _scaled(model):
        for side, vector in branch.vectors.items():
            beta: Tensor | None = getattr(vector, "magnitude", None)
            gradient = getattr(beta, "grad", None)
            if gradient is not None:
                out[f"{branch.name}/beta_{side}_grad"] = _mean(full_tensor(gradient).abs())
    return out | means_over_layers(out)


def _scaled(model: nn.Module) -> list[ScaledBranch]:
    """Return the branches with scale vectors; one that heads share has the width of a head."""
    branches = []
    for branch in scaled_branches(model):
        vectors = dict(branch.vectors)
        for side, vector in vectors.items():
            if isinstance(vector, HeadShared):
                vectors[side] = vector.vector
        if vectors:
            branches.append(replace(branch, vectors=vectors))
    return branches


def _squared_lengths(weight: Tensor, side: str, gamma: Tensor) -> Tensor:
    """Return ||w_j||^2, (*batch_dims, d).

    w_j is the part of W that entry j of gamma (..., d) scales, in all heads.
    """
    squares = weight.square().sum(_AXES[side])
    return squares.unflatten(-1, (-1, gamma.shape[-1])).sum(-2)


def _mean(values: Tensor) -> Tensor:
    return values.mean().double().cpu()


class ScaleVectorMonitor(BranchCallback):
    """Log `scale_vector_figures` and `beta_gradients`.

    Gradients are those of the step before the write, before clipping.

    Args:
        every_n_steps: optimizer steps between two writes; step 0 is always written
        model: dotted name of the submodule with the scale vectors; null to find it

    Raises:
        ConfigError: a value out of range
    """

    tag = "scale_vector"

    def __init__(self, every_n_steps: int = 100, model: str | None = None):
        super().__init__(every_n_steps, model)
        self._gradients: dict[str, Tensor] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock; before the first step there is no gradient."""
        self._gradients = {}
        super().on_train_start(trainer, pl_module)

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any
    ) -> None:
        """Save the gradients of beta if the step will be written."""
        if self._clock.is_due(trainer.global_step + 1):
            self._gradients = beta_gradients(self._model)

    def act(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Write the metrics."""
        with measuring(trainer):
            self.write(trainer, scale_vector_figures(self._model) | self._gradients)
