"""Preconditioning of each branch's gradient flow by its scale vectors, during a run."""

from collections import defaultdict
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
from lightning_sv.callbacks.logging import axis
from lightning_sv.callbacks.measuring import measuring
from lightning_sv.callbacks.run_state import known_steps, log_spaced
from lightning_sv.callbacks.tensorboard_layout import (
    Pages,
    add_curve,
    branch_curves,
    tag_of,
    tensorboard_loggers,
)
from lightning_sv.optim import full_tensor
from lightning_sv.scale.vector import ExponentialScale, HeadShared, OriginalSpaceScale

#: Number of quantiles per side in the histogram of a field.
_GRID = 64
#: An entry of gamma is dead below this fraction of the vector's rms (our choice).
_DEAD_BELOW = 0.01
#: side -> axis of W along which an entry of gamma has its w_j
_AXES = {"in": -2, "out": -1}


def preconditioner_figures(model: nn.Module) -> dict[str, Tensor]:
    """Return metrics of the scale vectors of every branch, keyed 'layer0/q_proj/drift_in'.

    field_spread, field_log_std: max / min of |u_i v_j| and the standard deviation of its log, with
    u = gamma_out and v = gamma_in; infinite and nan with an entry of 0.
    Per side, in for gamma_in and out for gamma_out (with rows for columns on the output side):

    - drift: rms of gamma - 1, zero at initialization; dead, negative: fraction of entries with
      |gamma| below 1% of its rms, and below 0; beta, if there is one
    - p_radial, p_tangent: `parameterization_preconditioner`, for `or` and `er`
    - imbalance: mean over columns j of |gamma_j^2 - ||w_j||^2| / (gamma_j^2 + ||w_j||^2). w_j has
      the columns of all branches and experts that share gamma. Weight decay of both keeps it small
      (paper, Section 2.2)
    - eig_low, eig_high: the extreme eigenvalues of gamma_j^2 I + w_j w_j^T over all columns j
      (paper, Section 2.1), with w_j of this branch alone

    With `share_heads`, gamma_out is the vector of one head, and w_j has the rows of all heads that
    it scales. Each side is evaluated alone, in closed form. Under `dnp`, these figures ignore the
    norm between W and gamma_out. Means over experts; 'mean/...' over layers. Norms without branches
    have one side. A collective if weights are sharded.
    """
    out: dict[str, Tensor] = {}
    with torch.no_grad():
        for branch in _scaled(model):
            for key, value in _branch_figures(branch).items():
                out[f"{branch.name}/{key}"] = value
        out |= _imbalances(model)
    return out | means_over_layers(out)


def _branch_figures(branch: ScaledBranch) -> dict[str, Tensor]:
    """Return the figures of a branch's field, and of the vector of each side."""
    gammas = branch.gammas()
    figures: dict[str, Tensor] = {}
    if branch.weight is not None:
        figures |= _field(branch.weight, gammas)
    for side, gamma in gammas.items():
        of_side = _side_figures(gamma, branch.vectors[side])
        figures |= {f"{key}_{side}": _mean(value) for key, value in of_side.items()}
    return figures


def _side_figures(gamma: Tensor, vector: Any) -> dict[str, Tensor]:
    """Return the figures of one vector: drift, dead, negative, beta and its preconditioner."""
    wide = gamma.double()
    rms = wide.square().mean(-1, keepdim=True).sqrt()
    figures = {
        "drift": (wide - 1).square().mean(-1).sqrt(),
        "dead": (wide.abs() <= _DEAD_BELOW * rms).double(),
        "negative": (wide < 0).double(),
    }
    figures |= parameterization_preconditioner(vector)
    beta = getattr(vector, "magnitude", None)
    if beta is not None:
        figures["beta"] = full_tensor(beta)
    return figures


def parameterization_preconditioner(vector: Any) -> dict[str, Tensor]:
    """Return g^T P g along gamma, and the mean of P orthogonal to it.

    P = J J^T, with J = d gamma / d (alpha, beta).

    The flow of gamma is -P dL/dgamma (paper, Section 3.3); P is 1 without `or` and `er`, for which
    the result is empty. With g = gamma / ||gamma||: p_radial = g^T P g and p_tangent = (tr P -
    p_radial) / (d - 1). `or`: d and beta^2 d / ||alpha||^2, which are eigenvalues. p_tangent is 0
    at d = 1, which has no such direction. `er`: P = gamma gamma^T + D (I - 1 1^T / d) D with D =
    diag(gamma). The shape of both is (*batch_dims, 1).
    """
    if type(vector) is OriginalSpaceScale:  # a subclass may have another formula
        alpha = full_tensor(vector.alpha).detach()
        beta = full_tensor(vector.beta).detach()
        tangent = beta.square() / alpha.square().mean(-1, keepdim=True)
        radial = torch.full_like(tangent, vector.d)
        if vector.d == 1:
            tangent = torch.zeros_like(tangent)
        return {"p_radial": radial, "p_tangent": tangent}
    if type(vector) is ExponentialScale:
        square = full_tensor(vector()).detach().square()
        length = square.sum(-1, keepdim=True)
        radial = length + square.square().sum(-1, keepdim=True) / length - length / vector.d
        trace = length * (2 - 1 / vector.d)
        return {"p_radial": radial, "p_tangent": (trace - radial) / max(vector.d - 1, 1)}
    return {}


def _imbalances(model: nn.Module) -> dict[str, Tensor]:
    """Return the imbalance of every side of every branch.

    Branches that share a vector share its value.
    """
    sharing: dict[tuple[int, str], list[ScaledBranch]] = defaultdict(list)
    for branch in _scaled(model):
        if branch.weight is None:
            continue
        for side, vector in branch.vectors.items():
            sharing[id(vector), side].append(branch)

    out: dict[str, Tensor] = {}
    for (_, side), branches in sharing.items():
        value = _imbalance(branches, side)
        for branch in branches:
            out[f"{branch.name}/imbalance_{side}"] = value
    return out


def _imbalance(branches: list[ScaledBranch], side: str) -> Tensor:
    """Return the imbalance of the vector that the branches share."""
    square = branches[0].gammas()[side].square()
    lengths = torch.zeros_like(square)
    for branch in branches:
        assert branch.weight is not None
        of_branch = _squared_lengths(branch.weight, side, square)
        lengths = lengths + of_branch.sum_to_size(square.shape)  # over experts that share gamma
    return _mean((square - lengths).abs() / (square + lengths))


def beta_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return |dL / d beta| of the current gradients, keyed 'layer0/q_proj/beta_in_grad'.

    Means over experts.

    Under `dnp` the loss does not depend on the beta of scale_in. Its gradient consists of rounding
    errors and the effect of eps, but Adam, which normalizes by its size, still moves it at full
    rate.
    """
    out: dict[str, Tensor] = {}
    for branch in _scaled(model):
        for side, vector in branch.vectors.items():
            beta: Tensor | None = getattr(vector, "magnitude", None)
            if beta is not None and beta.grad is not None:
                out[f"{branch.name}/beta_{side}_grad"] = _mean(full_tensor(beta.grad).abs())
    return out | means_over_layers(out)


def _scaled(model: nn.Module) -> list[ScaledBranch]:
    """Return the branches with scale vectors; one that heads share has the width of a head."""
    branches = []
    for branch in scaled_branches(model):
        if branch.vectors:
            own = {side: _of_one_head(vector) for side, vector in branch.vectors.items()}
            branches.append(replace(branch, vectors=own))
    return branches


def _of_one_head(vector: Any) -> Any:
    return vector.vector if isinstance(vector, HeadShared) else vector


def _squared_lengths(weight: Tensor, side: str, gamma: Tensor) -> Tensor:
    """Return ||w_j||^2, (*batch_dims, d).

    w_j is the part of W that entry j of gamma (..., d) scales, in all heads.
    """
    squares = full_tensor(weight).square().sum(_AXES[side])
    return squares.unflatten(-1, (-1, gamma.shape[-1])).sum(-2)


def _field(weight: Tensor, gammas: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the extreme eigenvalues per side, and the spread of |u_i v_j|."""
    weight = full_tensor(weight)
    figures: dict[str, Tensor] = {}
    spread = torch.ones(())
    variance = torch.zeros(())
    for side, gamma in gammas.items():
        square = gamma.square()
        high = square + _squared_lengths(weight, side, gamma)
        is_number = weight.shape[_AXES[side]] == 1  # w_j has one entry: one eigenvalue
        low = high if is_number else square
        figures[f"eig_low_{side}"] = _mean(low.amin(-1))
        figures[f"eig_high_{side}"] = _mean(high.amax(-1))
        size = gamma.double().abs()
        spread = spread * size.amax(-1) / size.amin(-1)
        variance = variance + size.log().var(-1, correction=0)  # u and v vary independently
    figures["field_spread"] = _mean(spread)
    figures["field_log_std"] = _mean(variance.sqrt())
    return figures


def _mean(values: Tensor) -> Tensor:
    return values.mean().double().cpu()


class Preconditioner(BranchCallback):
    """Log `preconditioner_figures` and `beta_gradients` and histograms.

    Gradients are those of the step before the write, before clipping. Histograms: gamma_in and
    gamma_out of each branch, and log10 |u_i v_j| over a grid of their quantiles.

    Args:
        every_n_steps: optimizer steps between two writes; step 0 is always written
        histograms: number of histogram writes in a run: at the start, then geometrically spaced
            from 1% of the run
        model: dotted name of the submodule with the scale vectors; null to find it

    Raises:
        ConfigError: a value out of range
    """

    tag = "preconditioner"

    def __init__(self, every_n_steps: int = 100, histograms: int = 9, model: str | None = None):
        super().__init__(every_n_steps, model)
        self.expect_at_least("histograms", histograms, 2)
        self.histograms = histograms
        self._gradients: dict[str, Tensor] = {}

    def chosen_steps(self, trainer: L.Trainer) -> list[int]:
        """Return the steps of the histograms."""
        return log_spaced(known_steps(trainer, self.name), self.histograms)

    def charts(self) -> Pages:
        """Return a page per group of branches.

        It has a chart per metric and side, with a curve per branch, averaged over layers.
        """
        pages: Pages = {}
        for curve in branch_curves(preconditioner_figures(self._model)):
            if curve.place != "mean":
                continue
            page = f"{self.tag}: {curve.page}"
            tag = f"{self.tag}/{curve.key}"
            add_curve(pages, page, curve.figure, tag)
            if curve.figure.startswith("beta_"):
                add_curve(pages, page, f"{curve.figure}_grad", f"{tag}_grad")
        return pages

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any
    ) -> None:
        """Save the gradients of beta if the step will be written."""
        if self._clock.is_due(trainer.global_step + 1):
            self._gradients = beta_gradients(self._model)

    def act(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Write the metrics, and at some steps the histograms."""
        with measuring(trainer):
            self.write(trainer, preconditioner_figures(self._model) | self._gradients)
            if self._clock.is_chosen(trainer.global_step):
                self._write_histograms(trainer)

    def _write_histograms(self, trainer: L.Trainer) -> None:
        for branch in _scaled(self._model):
            for key, values in _histograms(branch).items():
                _add_histogram(trainer, f"{self.tag}/{branch.name}/{key}", values)


def _histograms(branch: ScaledBranch) -> dict[str, Tensor]:
    """Return gamma of each side, and log10 |u_i v_j| on a grid of quantiles."""
    values: dict[str, Tensor] = {}
    for side, gamma in branch.gammas().items():
        values[f"gamma_{side}"] = gamma.detach().double().cpu()
    if branch.weight is None:
        return values

    at = torch.linspace(0, 1, _GRID, dtype=torch.float64)
    quantiles = [gamma.abs().flatten().quantile(at).log10() for gamma in values.values()]
    field = torch.zeros(())
    for axis_values in torch.meshgrid(*quantiles, indexing="ij"):
        field = field + axis_values
    values["field"] = field
    return values


def _add_histogram(trainer: L.Trainer, tag: str, values: Tensor) -> None:
    """Write a histogram of the finite values, if there are any."""
    finite = values[values.isfinite()]
    if not len(finite):
        return
    for logger in tensorboard_loggers(trainer):
        own_tag = tag_of(logger, tag)
        logger.experiment.add_histogram(own_tag, finite, axis(logger, trainer))
