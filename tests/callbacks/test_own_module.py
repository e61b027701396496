"""The callbacks on modules and in Trainers of a user."""

import runpy
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning import LightningModule
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torchmetrics import MeanMetric

import lightning_sv
from lightning_sv import ScaleVectorMonitor, Sharpness, TokenDataModule, apply_strategy
from lightning_sv.callbacks import (
    BranchNorms,
    CopyingMonitor,
    ResidualMonitor,
    RouterMonitor,
    TrainingMonitor,
)
from lightning_sv.callbacks.metric_accumulator import MetricAccumulator
from lightning_sv.callbacks.tensorboard_layout import tag_of
from lightning_sv.callbacks.training_monitor import mean_loss
from lightning_sv.errors import ConfigError
from tests.callbacks.stub import run_of
from tests.conftest import thinned
from tests.lit.own_trainer import (
    BIASED,
    OWN_MODULE,
    SIZES,
    blocks,
    column,
    loader,
    module,
    tags,
    trainer,
)
from tests.lit.runs import differences

#: Lightning warns about few workers, full folders and missing seeds
pytestmark = pytest.mark.filterwarnings("ignore")


def test_training_monitor_keeps_the_loss_for_other_callbacks(
    data: TokenDataModule, tmp_path: Path
) -> None:
    checkpoints = []
    for tag in ("train/loss", "branch_norm/mean/q_proj/effective"):
        checkpoints.append(ModelCheckpoint(tmp_path / tag, monitor=tag, every_n_train_steps=1))
    run = trainer(tmp_path, TrainingMonitor(1), BranchNorms(1), *checkpoints)
    run.fit(module(), data)
    assert "scale: hg+dp+or" in next(tmp_path.rglob("hparams.yaml")).read_text()
    assert all(checkpoint.best_model_path for checkpoint in checkpoints)
    assert {"train/loss", "val/loss"} <= run.progress_bar_metrics.keys()
    assert len(column(tmp_path, "train/loss")) == 4  # each step once


def test_logger_prefix_is_in_the_tags_of_the_layout(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, prefix="run")
    assert tag_of(logger, "train/loss") == "run-train/loss"


class Foreign(L.LightningModule):
    """A user's module without `forward`, whose step logs a loss of its own by a metric."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net
        self.mean = MeanMetric()

    def training_step(self, block: Tensor, batch_idx: int) -> Any:
        return self.logged_loss(self.net(block[:, :-1]), block)

    def logged_loss(self, logits: Tensor, block: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), block[:, 1:].flatten())
        self.mean.update(loss)
        self.log("loss", loss)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class ForeignMixture(Foreign):
    """A user's module that returns its routings."""

    def training_step(self, block: Tensor, batch_idx: int) -> Any:
        logits, routings = self.net(block[:, :-1], with_routing=True)
        return {"loss": self.logged_loss(logits, block), "routings": routings}


def plain() -> nn.Module:
    """Return the network of the example, which has no scale vectors."""
    return runpy.run_path(str(OWN_MODULE))["Net"](vocab_size=300)  # type: ignore[no-any-return]


def foreign(kind: str) -> nn.Module:
    if kind == "plain":
        return plain()
    if kind == "applied":
        net = plain()
        apply_strategy(net, "hg+dp+or", example=blocks()[:, :-1])
        return net
    config = BIASED if kind == "mixture" else SIZES
    return lightning_sv.Backbone(config, "hg+dp+or", seed=0)


@pytest.mark.parametrize(
    "kind", thinned(["applied", "backbone", "mixture"], ["applied", "mixture"])
)
@pytest.mark.parametrize("name", thinned([None, "net"], ["net"]))
def test_callbacks_leave_custom_training_unchanged(
    kind: str, name: str | None, tmp_path: Path
) -> None:
    module_class = ForeignMixture if kind == "mixture" else Foreign
    user = module_class(foreign(kind))
    quiet = deepcopy(user)

    def loss(user: Any) -> Tensor:
        return user.training_step(blocks(4), 0)

    probe = Sharpness(("all", "scale_input"), points=3, loss=loss, model=name)
    vectors = ScaleVectorMonitor(2, model=name)
    callbacks: list[L.Callback] = [TrainingMonitor(2), BranchNorms(2, model=name), vectors, probe]
    if kind == "mixture":
        callbacks.append(RouterMonitor(2, model=name))
    trainer(tmp_path / "user", *callbacks, accumulate_grad_batches=2).fit(user, loader())
    assert expected_tags(kind) <= tags(tmp_path / "user")
    trainer(tmp_path / "quiet", accumulate_grad_batches=2).fit(quiet, loader())
    # the probes leave training alone
    assert differences(quiet.state_dict(), user.state_dict()) == []
    for tag in ("loss", "mean"):
        losses = column(tmp_path / "user", tag)
        assert losses and losses == column(tmp_path / "quiet", tag)
    losses = column(tmp_path / "user", "loss")
    assert column(tmp_path / "user", "train/loss")[0] == pytest.approx(losses[0], rel=0.1)


@pytest.mark.parametrize("kind", ["applied", "unified"])
def test_model_with_a_strategy_can_be_traced(kind: str) -> None:
    """As for TensorBoard's graph; torch compares the trace with a pass without gradients."""
    model = foreign(kind) if kind == "applied" else lightning_sv.Backbone(SIZES, kind, seed=0)
    torch.jit.trace(model, blocks(2)[:, :-1])


def expected_tags(kind: str) -> set[str]:
    branches = {"applied": "head/up_proj", "backbone": "layer0/up_proj"}
    branch = branches.get(kind, "layer0/expert_up_proj")
    expected = {
        "train/loss",
        "lr",
        "throughput/steps_per_s",
        "sharpness/all/trace",
        "sharpness/scale_input/lambda_max",
        f"branch_norm/{branch}/effective",
        f"scale_vector/{branch}/drift_in",
    }
    if kind == "mixture":
        expected.add("moe/layer0/load_max")
    return expected


def test_router_monitor_loads_are_those_of_the_block(tmp_path: Path) -> None:
    net = lightning_sv.Backbone(replace(BIASED, n_layer=2), "hg", seed=0)
    net.layers[1].ffn.router_bias[0] = 9
    trainer(tmp_path, RouterMonitor(1), max_steps=1).fit(ForeignMixture(net), loader())
    (first,), (second,) = (column(tmp_path, f"moe/layer{i}/load/expert0") for i in range(2))
    assert first < 1.5 and second == 1.5  # of 3 experts, 2 active


def test_training_loss_of_half_precision_is_summed_in_float32() -> None:
    run: Any = SimpleNamespace(accumulate_grad_batches=4)
    user: Any = SimpleNamespace(automatic_optimization=True)
    loss = mean_loss(run, user, torch.tensor(0.5, dtype=torch.bfloat16))
    assert loss.dtype == torch.float32 and loss.item() == 2.0  # Lightning has divided it by 4
    nats = mean_loss(run, user, {"loss": torch.tensor(9.0), "nats": torch.tensor(3.0)})
    assert nats.item() == 3.0
    assert mean_loss(run, user, None) is None


class WithoutOptimizer(Foreign):
    """A user's module that trains nothing."""

    def configure_optimizers(self) -> Any:
        return None


@pytest.mark.parametrize("kind", [Foreign, WithoutOptimizer])
def test_monitors_log_what_a_custom_module_has(
    kind: type[Foreign], data: TokenDataModule, tmp_path: Path
) -> None:
    monitors = (TrainingMonitor(1), CopyingMonitor(2, 2, model="net"))
    trainer(tmp_path, *monitors).fit(kind(foreign("backbone")), data)
    logged = tags(tmp_path)
    assert {"train/loss", "copying/repeat"} <= logged
    assert ("lr" in logged) == (kind is Foreign)


def test_metric_accumulator_drops_sums_of_an_incomplete_step() -> None:
    """They are not in a checkpoint inside of the step, and the next fit starts without them."""
    run = run_of(9)
    sums = MetricAccumulator(4)
    sums.on_train_start(run, LightningModule())
    run.global_step = 1
    sums.add({"loss": torch.tensor(1.0)}, 2)
    sums.add({"loss": torch.tensor(10.0)}, 2)
    assert sums.state_dict() == {"sums": {"loss": 1, "sequences": 2}}
    sums.on_train_start(run, LightningModule())
    run.global_step = 2
    sums.add({"loss": torch.tensor(3.0)}, 2)
    assert sums.take() == ({"loss": 4}, 4)


def test_metric_accumulator_keeps_the_sums_of_this_device_in_a_second_fit() -> None:
    """Those of a checkpoint are of all devices, and rank 0 alone continues them."""
    rank = run_of(9, is_global_zero=False)
    sums = MetricAccumulator(4)
    for restored in (False, True, False):
        sums.on_train_start(rank, LightningModule())
        rank.global_step += 1
        sums.add({"loss": torch.tensor(2.0)}, 1)
        state = sums.state_dict()
        if restored:
            sums.load_state_dict(state)
        sums.on_train_start(rank, LightningModule())
        assert (sums.state_dict() == state) != restored
        assert restored or float(sums.take()[0]["loss"]) == 2


def training_loss(user: Any) -> Tensor:
    return user.training_step(blocks(2), 0)  # type: ignore[no-any-return]


@torch.no_grad()
def training_step(user: nn.Module) -> Tensor:
    """Change a weight, as an optimizer step inside of the loss does."""
    return next(user.parameters()).add_(1).sum()


#: a callback, the network of a user's module, and what the error names
REFUSED = [
    (BranchNorms(), "plain", "^the model of BranchNorms is Foreign"),
    (BranchNorms(model="nett"), "plain", "nett"),
    (ScaleVectorMonitor(), "plain", "^the model of ScaleVectorMonitor is Foreign"),
    (RouterMonitor(), "plain", "^the model of RouterMonitor is Foreign"),
    (RouterMonitor(1), "mixture", "^number of routings"),
    (Sharpness(), "plain", "Sharpness"),
    (Sharpness(("all", "scale_input"), 2, loss=training_loss), "plain", "^the model of Sharpness is Foreign"),
    (Sharpness(("scale_output",), 2, loss=training_loss), "plain", "^the model of Sharpness is Foreign"),
    (Sharpness(("all",), 2, loss=training_step), "applied", "^loss of Sharpness is"),
    (CopyingMonitor(2, 2), "backbone", "Foreign has no forward"),
    (ResidualMonitor(2, 2), "backbone", "Foreign has no forward"),
    (ResidualMonitor(model="net"), "plain", "ResidualMonitor"),
]  # fmt: skip


@pytest.mark.parametrize(("callback", "kind", "key"), REFUSED)
def test_callback_of_a_module_that_it_cannot_read_is_refused(
    callback: L.Callback, kind: str, key: str, data: TokenDataModule, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=key):
        trainer(tmp_path, callback).fit(Foreign(foreign(kind)), data)


def test_sharpness_leaves_out_scale_vectors_of_a_strategy_without(tmp_path: Path) -> None:
    """One config serves all strategies."""
    for net, subsets in (
        (lightning_sv.Backbone(SIZES, "nop"), ("all", "scale_input")),
        (plain(), ("all",)),
    ):
        probe = Sharpness(subsets, 2, lanczos_steps=1, loss=training_loss)
        trainer(tmp_path, probe, max_steps=1).fit(Foreign(net), loader())


def test_callbacks_of_training_ignore_validation(tmp_path: Path) -> None:
    run = trainer(tmp_path, Sharpness(), lightning_sv.TextSamples(3), CopyingMonitor())
    assert run.validate(module(), loader(), verbose=False)


def test_training_monitor_speed_leaves_out_validation(
    data: TokenDataModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 tokens per batch of one second; a batch of validation takes 1,000 seconds."""
    clock = SimpleNamespace(seconds=0.0, perf_counter=lambda: clock.seconds)
    for name in ("training_monitor", "throughput"):
        monkeypatch.setattr(f"lightning_sv.callbacks.{name}.time", clock)

    def wait(seconds: float) -> Any:
        return lambda *_: setattr(clock, "seconds", clock.seconds + seconds)

    waits = LambdaCallback(on_train_batch_start=wait(1), on_validation_batch_start=wait(1000))
    trainer(tmp_path, TrainingMonitor(2), waits, val_check_interval=1).fit(module(), data)
    assert column(tmp_path, "throughput/tokens_per_s") == pytest.approx([16, 16])
