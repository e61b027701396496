"""Relative steps and the share of clipped steps, against weights copied before and after each
step."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_sv import PretrainModule, TokenDataModule
from lightning_sv.callbacks import RelativeSteps, TrainingMonitor
from lightning_sv.optim import OptimConfig
from tests.lit.own_trainer import MIXTURE, SIZES, rows, trainer

pytestmark = pytest.mark.filterwarnings("ignore")


class Steps(L.Callback):
    """Copy the weights before each micro-batch, and the gradients and norms before each step."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []
        self.gradients: list[dict[str, Tensor]] = []

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.weights.append(
                {name: p.detach().clone() for name, p in pl_module.named_parameters()}
            )

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any
    ) -> None:
        self.gradients.append(
            {name: p.grad.clone() for name, p in pl_module.named_parameters() if p.grad is not None}
        )


def fit(corpus: Path, out: Path, *callbacks: L.Callback, **changes: Any) -> PretrainModule:
    settings = {"backbone": SIZES, "scale": "hg+dp+or", "lr": 0.01, "seed": 0, **changes}
    made = PretrainModule(**settings)
    data = TokenDataModule(
        corpus, seq_len=8, batch_size=2, val_sequences=8, seed=0, full_last_validation=False
    )
    own = trainer(
        out, *callbacks, accumulate_grad_batches=2, limit_val_batches=0, gradient_clip_val=1.0
    )
    own.fit(made, data)
    return made


def relative(before: dict[str, Tensor], after: dict[str, Tensor], names: list[str]) -> float:
    """Return the ratio of the norms over all entries of these parameters."""
    change = torch.cat([(after[name] - before[name]).flatten() for name in names])
    return float(change.norm() / torch.cat([before[name].flatten() for name in names]).norm())


@pytest.mark.parametrize(("optim", "changes"), [
    ("adamw", {}),
    ("muon", {}),
    ("adamw", {"backbone": MIXTURE, "scale": "unified"}),
])  # fmt: skip
def test_relative_steps_are_those_of_the_weights(
    corpus: Path, tmp_path: Path, optim: str, changes: dict[str, Any]
) -> None:
    steps = Steps()
    made = fit(corpus, tmp_path, steps, RelativeSteps(2), optim=OptimConfig(optim), **changes)
    final = {name: p.detach() for name, p in made.named_parameters()}
    weights = [*steps.weights, final]
    logged = [row for row in rows(tmp_path) if row["relative_step/role/matrix"]]
    assert [int(row["step"]) for row in logged] == [2, 4]
    matrices = [
        name
        for name in final
        if name.endswith("weight") and "layers" in name and "router" not in name
    ]
    query = next(name for name in matrices if "q_proj" in name)
    alpha = next(name for name in final if "q_proj" in name and name.endswith("scale_in.alpha"))
    for row, step in zip(logged, (2, 4), strict=True):
        before, after = weights[step - 1], weights[step]
        expected = {
            "role/matrix": relative(before, after, matrices),
            "layer0/q_proj/W": relative(before, after, [query]),
            "mean/q_proj/W": relative(before, after, [query]),
            "layer0/q_proj/alpha_in": relative(before, after, [alpha]),
        }
        for key, value in expected.items():
            assert float(row[f"relative_step/{key}"]) == pytest.approx(value, rel=1e-5), key
        assert float(row["relative_step/layer0/q_proj/gamma_in"]) > 0


def test_relative_step_of_gradient_descent_is_rate_times_gradient(
    corpus: Path, tmp_path: Path
) -> None:
    """By hand: lr ||g|| / ||W|| with the clipped gradient, at the rate of the schedule."""
    steps = Steps()
    made = fit(
        corpus,
        tmp_path,
        steps,
        RelativeSteps(1),
        optim=OptimConfig("sgd", beta1=0.0, weight_decay=0.0),
    )
    logged = [row for row in rows(tmp_path) if row["relative_step/role/head"]]
    assert len(logged) == len(steps.gradients) == 4
    for step, (row, gradients, weights) in enumerate(
        zip(logged, steps.gradients, steps.weights, strict=True)
    ):
        norm = torch.cat([g.flatten() for g in gradients.values()]).norm()
        rate = made.lr * made.settings.schedule.factor(step, 4)
        (head,) = (name for name in weights if "lm_head" in name and name.endswith("weight"))
        expected = rate * min(1.0, 1 / norm) * gradients[head].norm() / weights[head].norm()
        assert float(row["relative_step/role/head"]) == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize(("scale", "limit"), [("median", None), ("none", 1e9), ("all", 1e-9)])
def test_clipped_steps_are_the_share_above_the_limit(
    corpus: Path, tmp_path: Path, scale: str, limit: float | None
) -> None:
    steps = Steps()
    fit(corpus, tmp_path / "first", steps)
    norms = [
        float(torch.cat([g.flatten() for g in each.values()]).norm()) for each in steps.gradients
    ]
    clip = sum(sorted(norms)[1:3]) / 2 if limit is None else limit
    made = PretrainModule(SIZES, scale="hg+dp+or", lr=0.01, seed=0)
    data = TokenDataModule(
        corpus, seq_len=8, batch_size=2, val_sequences=8, seed=0, full_last_validation=False
    )
    monitor, again = TrainingMonitor(4), Steps()
    own = L.Trainer(
        max_steps=4, accelerator="cpu", devices=1, accumulate_grad_batches=2, limit_val_batches=0,
        gradient_clip_val=clip, logger=CSVLogger(tmp_path), callbacks=[monitor, again], enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    own.fit(made, data)
    norms = [
        float(torch.cat([g.flatten() for g in each.values()]).norm()) for each in again.gradients
    ]
    expected = sum(norm > clip for norm in norms) / 4
    assert float(own.callback_metrics["clipped_steps"]) == expected
    assert expected == {"none": 0, "all": 1}.get(scale, expected)
