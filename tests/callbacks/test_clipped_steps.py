"""The share of clipped steps, against the norms of the gradients of each step."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_sv import TrainingMonitor
from tests.lit.own_trainer import column, module, small_data, trainer

pytestmark = pytest.mark.filterwarnings("ignore")


class GradientNorms(L.Callback):
    """Note the norm of all gradients before each step is clipped."""

    def __init__(self) -> None:
        self.norms: list[Tensor] = []

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any
    ) -> None:
        gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
        self.norms.append(nn.utils.get_total_norm(gradients))


def fit(corpus: Path, out: Path, *callbacks: L.Callback, clip: float) -> None:
    own = trainer(
        out, *callbacks, accumulate_grad_batches=2, limit_val_batches=0, gradient_clip_val=clip
    )
    own.fit(module(), small_data(corpus))


@pytest.mark.parametrize("limit", ["mean", 1e9, 1e-9])
def test_clipped_steps_are_the_share_above_the_limit(
    limit: Any, corpus: Path, tmp_path: Path
) -> None:
    if limit == "mean":
        first = GradientNorms()
        fit(corpus, tmp_path / "first", first, clip=1.0)
        limit = torch.stack(first.norms).mean().item()
    again = GradientNorms()
    fit(corpus, tmp_path / "again", TrainingMonitor(4), again, clip=limit)
    n_clipped = sum(norm > limit for norm in again.norms)
    assert column(tmp_path / "again", "clipped_steps") == [n_clipped / 4]
    assert n_clipped == {1e9: 0, 1e-9: 4}.get(limit, n_clipped)
