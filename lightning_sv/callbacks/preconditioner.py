"""Preconditioning of each branch's gradient flow by its scale vectors, during a run."""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn

from lightning_sv.callbacks.branch_norms import BranchCallback, ScaledBranch, means_over_layers, scaled_branches
from lightning_sv.callbacks.run_state import known_steps, log_spaced
from lightning_sv.callbacks.tensorboard_layout import BRANCH_PAGES, Pages, tag_of
from lightning_sv.callbacks.training_monitor import axis, measuring, write_scalars
from lightning_sv.errors import expect
from lightning_sv.optim import full_tensor
from lightning_sv.scale.vector import ExponentialScale, HeadShared, OriginalSpaceScale

#: Number of quantiles per side in the histogram of a field.
_GRID = 64
#: An entry of gamma is dead below this fraction of the vector's rms (our choice).
_DEAD_BELOW = 0.01


def preconditioner_figures(model: nn.Module) -> dict[str, Tensor]:
    """Return metrics of the scale vectors of every branch, as scalar tensors keyed 'layer0/q_proj/drift_in'.

    field_spread, field_log_std: max / min of |u_i v_j| and the standard deviation of its log, with u = gamma_out
    and v = gamma_in; infinite and nan with an entry of 0.
    Per side, in for gamma_in and out for gamma_out (with rows for columns on the output side):

    - drift: rms of gamma - 1, zero at initialization; dead, negative: fraction of entries with |gamma| below 1% of its
      rms, and below 0; beta, if there is one
    - p_radial, p_tangent: `parameterization_preconditioner`, for `or` and `er`
    - imbalance: mean over columns j of |gamma_j^2 - ||w_j||^2| / (gamma_j^2 + ||w_j||^2). w_j has the columns of
      all branches and experts that share gamma. Weight decay of both keeps it small (paper, Section 2.2)
    - eig_low, eig_high: the extreme eigenvalues of gamma_j^2 I + w_j w_j^T over all columns j (paper, Section 2.1),
      with w_j of this branch alone

    With `share_heads`, gamma_out is the vector of one head, and w_j has the rows of all heads that it scales.
    Each side is evaluated alone, in closed form. Under `dnp`, these figures ignore the norm between W and gamma_out.
    Means over experts; 'mean/...' over layers. Norms without branches have one side. A collective if
    weights are sharded.
    """
    out: dict[str, Tensor] = {}
    with torch.no_grad():
        for where, weight, sides, _ in _scaled(model):
            gammas = {side: full_tensor(vector()) for side, vector in sides.items()}
            if weight is not None:
                out |= {f"{where}/{key}": value for key, value in _field(weight, gammas).items()}
            for side, gamma in gammas.items():
                wide = gamma.double()
                figures = {
                    "drift": (wide - 1).square().mean(-1).sqrt(),
                    "dead": (wide.abs() <= _DEAD_BELOW * wide.square().mean(-1, keepdim=True).sqrt()).double(),
                    "negative": (wide < 0).double(),
                } | parameterization_preconditioner(sides[side])
                if (beta := getattr(sides[side], "magnitude", None)) is not None:
                    figures["beta"] = full_tensor(beta)
                out |= {f"{where}/{key}_{side}": _mean(value) for key, value in figures.items()}
        out |= _imbalances(model)
    return out | means_over_layers(out)


def parameterization_preconditioner(vector: Any) -> dict[str, Tensor]:
    """Return g^T P g along gamma, and the mean of P orthogonal to it; P = J J^T, J = d gamma / d (alpha, beta).

    The flow of gamma is -P dL/dgamma (paper, Section 3.3); P is 1 without `or` and `er`, for which the result is empty.
    With g = gamma / ||gamma||: p_radial = g^T P g and p_tangent = (tr P - p_radial) / (d - 1).
    `or`: d and beta^2 d / ||alpha||^2, which are eigenvalues. p_tangent is 0 at d = 1, which has no such direction.
    `er`: P = gamma gamma^T + D (I - 1 1^T / d) D with D = diag(gamma).
    The shape of both is (*batch_dims, 1).
    """
    if type(vector) is OriginalSpaceScale:  # a subclass may have another formula
        alpha, beta = full_tensor(vector.alpha).detach(), full_tensor(vector.beta).detach()
        tangent = beta.square() / alpha.square().mean(-1, keepdim=True)
        return {"p_radial": torch.full_like(tangent, vector.d), "p_tangent": tangent * (vector.d > 1)}
    if type(vector) is ExponentialScale:
        square = full_tensor(vector()).detach().square()
        length = square.sum(-1, keepdim=True)
        radial = length + square.square().sum(-1, keepdim=True) / length - length / vector.d
        trace = length * (2 - 1 / vector.d)
        return {"p_radial": radial, "p_tangent": (trace - radial) / max(vector.d - 1, 1)}
    return {}


def _imbalances(model: nn.Module) -> dict[str, Tensor]:
    """Return the imbalance of every side of every branch; branches that share a vector share its value."""
    sharing: dict[tuple[int, str], list[ScaledBranch]] = {}
    for branch in _scaled(model):
        if branch.weight is not None:
            for side, vector in branch.vectors.items():
                sharing.setdefault((id(vector), side), []).append(branch)
    out: dict[str, Tensor] = {}
    for (_, side), branches in sharing.items():
        square = branches[0].gammas()[side].square()
        squares = (_squared_lengths(b.weight, side, square) for b in branches if b.weight is not None)
        lengths = sum(each.sum_to_size(square.shape) for each in squares)  # over experts too, if they share gamma
        value = _mean((square - lengths).abs() / (square + lengths))
        out |= {f"{branch.name}/imbalance_{side}": value for branch in branches}
    return out


def beta_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return |dL / d beta| of the current gradients, keyed 'layer0/q_proj/beta_in_grad'; the mean over experts.

    Under `dnp` the loss does not depend on the beta of scale_in. Its gradient consists of rounding errors and the
    effect of eps, but Adam, which normalizes by its size, still moves it at full rate.
    """
    out: dict[str, Tensor] = {}
    for where, _, sides, _ in _scaled(model):
        for side, vector in sides.items():
            beta: Tensor | None = getattr(vector, "magnitude", None)
            if beta is not None and beta.grad is not None:
                out[f"{where}/beta_{side}_grad"] = _mean(full_tensor(beta.grad).abs())
    return out | means_over_layers(out)


def _scaled(model: nn.Module) -> list[ScaledBranch]:
    """Return the branches with scale vectors; a vector that heads share has the width of one head."""
    branches = []
    for branch in scaled_branches(model):
        own = {side: v.vector if isinstance(v, HeadShared) else v for side, v in branch.vectors.items()}
        branches += [branch._replace(vectors=own)] if own else []
    return branches


def _squared_lengths(weight: Tensor, side: str, gamma: Tensor) -> Tensor:
    """Return ||w_j||^2, (*batch_dims, d); w_j is the part of W that entry j of gamma (..., d) scales, in all heads."""
    squares = full_tensor(weight).square().sum(-2 if side == "in" else -1)
    return squares.unflatten(-1, (-1, gamma.shape[-1])).sum(-2)


def _field(weight: Tensor, gammas: dict[str, Tensor]) -> dict[str, Tensor]:
    weight, out = full_tensor(weight), dict[str, Tensor]()
    spread, variance = torch.ones(()), torch.zeros(())
    for side, gamma in gammas.items():
        square = gamma.square()
        high = square + _squared_lengths(weight, side, gamma)
        low = high if weight.shape[-2 if side == "in" else -1] == 1 else square  # w_j is a number: one eigenvalue
        out |= {f"eig_low_{side}": _mean(low.amin(-1)), f"eig_high_{side}": _mean(high.amax(-1))}
        size = gamma.double().abs()
        spread = spread * size.amax(-1) / size.amin(-1)
        variance = variance + size.log().var(-1, correction=0)  # u and v vary independently
    return out | {"field_spread": _mean(spread), "field_log_std": _mean(variance.sqrt())}


def _mean(values: Tensor) -> Tensor:
    return values.mean().double().cpu()


class Preconditioner(BranchCallback):
    """Log `preconditioner_figures` and `beta_gradients` under preconditioner/, with a few histograms.

    Gradients are those of the step before the write, before clipping. Histograms: gamma_in and gamma_out
    of each branch, and log10 |u_i v_j| over a grid of their quantiles.

    Args:
        every_n_steps: optimizer steps between two writes; step 0 is always written
        histograms: number of histogram writes in a run: at the start, then geometrically spaced from 1% of the run
        model: dotted name of the submodule with the scale vectors; null to find it

    Raises:
        ConfigError: a value out of range
    """

    def __init__(self, every_n_steps: int = 100, histograms: int = 9, model: str | None = None):
        expect(histograms >= 2, "histograms of Preconditioner", histograms, "at least 2.")
        super().__init__("every_n_steps of Preconditioner", every_n_steps, model)
        self.histograms = histograms
        self._gradients: dict[str, Tensor] = {}

    def charts(self) -> Pages:
        """Return a page per group of branches: a chart per metric and side, a line per branch, averaged over layers."""
        pages: Pages = {}
        for place, name, figure in (key.split("/") for key in preconditioner_figures(self._model)):
            for page, members in BRANCH_PAGES.items():
                if place == "mean" and name in members:
                    charts = pages.setdefault(f"preconditioner: {page}", {})
                    for chart in (figure, f"{figure}_grad") if figure.startswith("beta_") else (figure,):
                        charts.setdefault(chart, ["Multiline", []])[1].append(f"preconditioner/mean/{name}/{chart}")
        return pages

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Choose the steps of the histograms, and write the initial metrics."""
        self._histogram_steps = frozenset(log_spaced(known_steps(trainer, "Preconditioner"), self.histograms))
        super().on_train_start(trainer, pl_module)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        """Save the gradients of beta if the step will be written."""
        if self._is_due(trainer.global_step + 1):
            self._gradients = beta_gradients(self._model)

    def _is_due(self, step: int) -> bool:
        return super()._is_due(step) or self._is_drawn(step)

    def _is_drawn(self, step: int) -> bool:
        passed = step == self._clock.step and self._clock.has_passed(self._histogram_steps)
        return passed or step in self._histogram_steps

    def _write(self, trainer: L.Trainer) -> None:
        with measuring(trainer):
            figures = preconditioner_figures(self._model) | self._gradients
            values = torch.stack(list(figures.values())).tolist() if figures else []
            write_scalars(trainer, {f"preconditioner/{k}": v for k, v in zip(figures, values, strict=True)})
            if self._is_drawn(trainer.global_step):
                self._write_histograms(trainer)

    def _write_histograms(self, trainer: L.Trainer) -> None:
        loggers = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
        at = torch.linspace(0, 1, _GRID, dtype=torch.float64)
        for branch in _scaled(self._model):
            values = {f"gamma_{side}": gamma.detach().double().cpu() for side, gamma in branch.gammas().items()}
            if branch.weight is not None:
                quantiles = [gamma.abs().flatten().quantile(at).log10() for gamma in values.values()]
                values["field"] = sum(torch.meshgrid(*quantiles, indexing="ij"), torch.zeros(()))
            for key, value in values.items():
                finite = value[value.isfinite()]
                for logger in loggers if len(finite) else ():
                    tag = tag_of(logger, f"preconditioner/{branch.name}/{key}")
                    logger.experiment.add_histogram(tag, finite, axis(logger, trainer))
