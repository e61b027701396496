"""Relative steps and the share of clipped steps, against weights copied before and after each
step."""

import math
import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_sv import Backbone, PretrainModule, ScaleOptions, TokenDataModule
from lightning_sv.callbacks import RelativeSteps, TrainingMonitor
from lightning_sv.callbacks.relative_steps import branch_tensors
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

    def norms(self) -> list[Tensor]:
        """Return the norm of all gradients of each step."""
        return [nn.utils.get_total_norm(list(each.values())) for each in self.gradients]


def fit(
    corpus: Path, out: Path, *callbacks: L.Callback, clip: float = 1.0, **changes: Any
) -> PretrainModule:
    settings = {"backbone": SIZES, "scale": "hg+dp+or", "lr": 0.01, "seed": 0, **changes}
    made = PretrainModule(**settings)
    data = TokenDataModule(
        corpus, seq_len=8, batch_size=2, val_sequences=8, seed=0, full_last_validation=False
    )
    own = trainer(
        out, *callbacks, accumulate_grad_batches=2, limit_val_batches=0, gradient_clip_val=clip
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
    final = dict(made.named_parameters())
    weights = [*steps.weights, final]
    logged = [row for row in rows(tmp_path) if row["relative_step/role/matrix"]]
    assert [int(row["step"]) for row in logged] == [2, 4]
    matrices = [name for name in final if re.fullmatch(r"backbone\.layers.*_proj\.weight", name)]
    (query,) = [name for name in matrices if "q_proj" in name]
    alpha = query.replace(".weight", ".scale_in.alpha")
    for row, step in zip(logged, (2, 4), strict=True):
        names_of = {
            "role/matrix": matrices,
            "layer0/q_proj/W": [query],
            "mean/q_proj/W": [query],
            "layer0/q_proj/alpha_in": [alpha],
        }
        for key, names in names_of.items():
            expected = relative(weights[step - 1], weights[step], names)
            assert float(row[f"relative_step/{key}"]) == pytest.approx(expected, rel=1e-5), key
        assert float(row["relative_step/layer0/q_proj/gamma_in"]) > 0


@pytest.mark.parametrize("scale", ["hg+dp+er", "hg+dp+offset"])
def test_relative_steps_from_zero_are_not_logged(corpus: Path, tmp_path: Path, scale: str) -> None:
    fit(corpus, tmp_path, RelativeSteps(1), scale=scale)
    logged = [row for row in rows(tmp_path) if row["relative_step/role/matrix"]]
    steps = []
    for row in logged:
        figures = {key: float(value) for key, value in row.items() if value and "relative" in key}
        assert all(map(math.isfinite, figures.values())) and not any("alpha" in k for k in figures)
        assert "relative_step/layer0/q_proj/gamma_in" in figures
        if "relative_step/role/input" in figures:
            steps.append(int(row["step"]))
    assert steps == [2, 3, 4]


def test_branch_tensors_of_a_vector_shared_by_heads_have_its_alpha() -> None:
    model = Backbone(SIZES, "hg+dnp+or", ScaleOptions(share_heads=["q_proj"]))
    (alpha,) = branch_tensors(model)["layer0/q_proj/alpha_out"]
    assert alpha is model.layers[0].attn.qkv.q_proj.scale_out.vector.alpha


@pytest.mark.parametrize(("scale", "limit"), [("mean", None), ("none", 1e9), ("all", 1e-9)])
def test_clipped_steps_are_the_share_above_the_limit(
    corpus: Path, tmp_path: Path, scale: str, limit: float | None
) -> None:
    if limit is None:
        steps = Steps()
        fit(corpus, tmp_path / "first", steps)
        limit = torch.stack(steps.norms()).mean().item()
    again = Steps()
    fit(corpus, tmp_path / "again", TrainingMonitor(4), again, clip=limit)
    n_clipped = sum(norm > limit for norm in again.norms())
    (logged,) = [row for row in rows(tmp_path / "again") if row.get("clipped_steps")]
    assert float(logged["clipped_steps"]) == n_clipped / 4
    assert n_clipped == {"none": 0, "all": 4}.get(scale, n_clipped)
