"""The callbacks on modules and in Trainers of a user."""

import runpy
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torchmetrics import CatMetric, MeanMetric, SumMetric

import lightning_sv
from lightning_sv import Preconditioner, PretrainModule, Sharpness, TokenDataModule, apply_strategy
from lightning_sv.callbacks import BranchNorms, ResidualMonitor, RouterMonitor, TrainingMonitor
from lightning_sv.callbacks.metric_accumulator import MetricAccumulator
from lightning_sv.callbacks.training_monitor import mean_loss
from lightning_sv.errors import ConfigError
from lightning_sv.nn import RouterConfig
from tests.conftest import thinned
from tests.lit.own_trainer import (
    BIASED,
    MIXTURE,
    OWN_MODULE,
    SIZES,
    blocks,
    loader,
    module,
    rows,
    tags,
    trainer,
)
from tests.lit.runs import differences, pages_of
from tests.lit.test_module import Manual

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
    assert sum(bool(row["train/loss"]) for row in rows(tmp_path)) == 4  # each step once


def test_logger_prefix_is_in_all_tags(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, prefix="run")
    callbacks = (TrainingMonitor(1), BranchNorms(2), Preconditioner())
    trainer(tmp_path, *callbacks, logger=logger).fit(module(), loader(), loader())
    written = EventAccumulator(logger.log_dir).Reload().Tags()
    drawn: set[str] = set()
    for charts in pages_of(Path(logger.log_dir)).values():
        drawn.update(*charts.values())
    assert drawn <= set(written["scalars"])


@pytest.mark.parametrize("kind", ["applied", "unified"])
def test_graph_of_an_example_input_is_drawn(kind: str, tmp_path: Path) -> None:
    """It is a trace, which torch compares with a pass without gradients."""
    user: Any = Foreign(foreign(kind)) if kind == "applied" else module(scale=kind)
    user.example_input_array = blocks(2)[:, :-1]
    logger = TensorBoardLogger(tmp_path, log_graph=True)
    trainer(tmp_path, logger=logger, enable_model_summary=True).fit(user, loader())


class Measured(PretrainModule):
    """Logs sums and values of every micro-batch, and returns the loss of a step."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.blocks = SumMetric()
        self.mean = MeanMetric()
        self.all = CatMetric()

    def training_step(self, block: Tensor, batch_idx: int) -> Any:
        out = super().training_step(block, batch_idx)
        self.blocks.update(len(block))
        self.log("blocks", self.blocks, on_step=False, on_epoch=True)
        self.log("mean", self.mean(out["nats"]))
        self.all.update(out["nats"])
        return out


def test_probe_leaves_metrics_of_a_training_step_and_biases_of_experts(tmp_path: Path) -> None:
    seen = []
    ends = []
    loss: Any = lambda module: module.training_step(blocks(), 0)  # noqa: E731
    for name, probes in (("plain", 0), ("probed", 1)):
        made = Measured(backbone=BIASED, lr=0.01, seed=0)
        probe = Sharpness(("scale_input",), 3, lanczos_steps=2, loss=loss)
        probe.time.clock = lambda: 0.0  # its budget would skip the probe in the middle
        run = trainer(tmp_path / name, *[probe] * probes, max_steps=6, val_check_interval=None)
        run.fit(made, loader())
        seen.append([run.callback_metrics["blocks"], made.mean.compute(), *made.all.compute()])
        ends.append(made.state_dict())
    assert seen[0] == seen[1] and len(seen[0]) == 8 and differences(*ends) == []


def test_probe_leaves_out_frozen_parameters(data: TokenDataModule, tmp_path: Path) -> None:
    class Frozen(PretrainModule):
        def setup(self, stage: str) -> None:
            self.configure_model()
            self.net.embed.requires_grad_(False)

    traces = []
    for name, loss in (
        ("own", None),
        ("given", lambda module: module.loss(data.settings.held_out(2))[0]),
    ):
        probe = Sharpness(("all",), 2, sequences=2, loss=loss)
        trainer(tmp_path / name, probe, max_steps=1).fit(Frozen(SIZES, lr=0.01, seed=0), data)
        traces.append(float(rows(tmp_path / name)[0]["sharpness/all/trace"]))
    assert traces[0] == pytest.approx(traces[1], rel=1e-3)


class Foreign(L.LightningModule):
    """A user's module, with a loss of its own."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, tokens: Tensor) -> Any:
        return self.net(tokens)

    def training_step(self, block: Tensor, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(
            self(block[:, :-1]).flatten(0, 1), block[:, 1:].flatten()
        )
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def plain() -> nn.Module:
    """Return the network of the example, which has no scale vectors."""
    return runpy.run_path(str(OWN_MODULE))["Net"](vocab_size=300)  # type: ignore[no-any-return]


def foreign(kind: str) -> nn.Module:
    if kind == "applied":
        net = plain()
        apply_strategy(net, "hg+dp+or", example=blocks()[:, :-1])
        return net
    config = MIXTURE if kind == "mixture" else SIZES
    return lightning_sv.Backbone(config, "hg+dp+or", seed=0)


@pytest.mark.parametrize(
    "kind", thinned(["applied", "backbone", "mixture"], ["applied", "mixture"])
)
@pytest.mark.parametrize("name", thinned([None, "net"], ["net"]))
def test_callbacks_leave_custom_training_unchanged(
    kind: str, name: str | None, tmp_path: Path
) -> None:
    user = Foreign(foreign(kind))
    before = {key: value.clone() for key, value in user.state_dict().items()}

    def loss(user: Any) -> Tensor:
        return user.training_step(blocks(4), 0)

    probe = Sharpness(("all", "scale_input"), points=3, loss=loss, model=name)
    probe.time.clock = lambda: 0.0  # its budget would skip the probe in the middle
    probes = [BranchNorms(2, model=name), Preconditioner(2, model=name), probe]
    callbacks: list[Any] = [TrainingMonitor(2), *probes]
    if kind == "mixture":
        callbacks.append(RouterMonitor(2, model=name))
    trainer(tmp_path / "user", *callbacks, accumulate_grad_batches=2).fit(user, loader())
    logged = tags(tmp_path / "user")
    assert expected_tags(kind) <= logged
    known = {"train", "loss", "epoch", "step", "lr", "memory", "throughput"}
    known |= {callback.tag for callback in callbacks[1:]}
    assert {tag.partition("/")[0] for tag in logged} <= known
    quiet = Foreign(foreign(kind))
    quiet.load_state_dict(before)
    trainer(tmp_path / "quiet", accumulate_grad_batches=2).fit(quiet, loader())
    # the probes leave training alone
    assert differences(quiet.state_dict(), user.state_dict()) == []
    losses = column(tmp_path / "user", "loss")
    assert losses == column(tmp_path / "quiet", "loss")
    assert column(tmp_path / "user", "train/loss")[0] == pytest.approx(losses[0], rel=0.1)


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
        f"preconditioner/{branch}/drift_in",
    }
    if kind == "mixture":
        expected.add("moe/layer0/load_max")
    return expected


def column(folder: Path, tag: str) -> list[float]:
    """Return the values of a tag, in order."""
    return [float(row[tag]) for row in rows(folder) if row[tag]]


class Teacher(Foreign):
    """Its second network runs first, and the third one is in evaluation mode."""

    def forward(self, tokens: Tensor) -> Any:
        a, b, teacher = self.net.values()  # type: ignore[operator,union-attr]
        teacher.eval()
        return b(tokens) + a(tokens) + teacher(tokens)


def test_router_monitor_loads_are_those_of_the_named_mixture(tmp_path: Path) -> None:
    config = replace(MIXTURE, router=RouterConfig(balance="bias"))
    user = Teacher(
        nn.ModuleDict({name: lightning_sv.Backbone(config, "hg", seed=0) for name in "abc"})
    )
    user.net["a"].layers[0].ffn.router_bias[0] = 9  # type: ignore[index,union-attr]
    trainer(tmp_path, RouterMonitor(1), max_steps=1).fit(user, loader())
    (logged,) = (row for row in rows(tmp_path) if row["moe/mean/entropy"])
    assert (
        float(logged["moe/layer0/net_a_layers_ffn/load/expert0"]) == 1.5
    )  # of 3 experts, 2 active
    assert float(logged["moe/layer0/net_b_layers_ffn/load/expert0"]) < 1.5
    assert not [tag for tag in logged if "net_c" in tag]


def test_sharpness_goes_on_after_vectors_are_frozen(tmp_path: Path) -> None:
    user = Foreign(foreign("applied"))
    tokens = blocks(2)

    def freeze(*_: object) -> None:
        for name, parameter in user.named_parameters():
            if "parametrizations" in name and "original" not in name:
                parameter.requires_grad_(False)

    probe = Sharpness(
        ("all", "scale_output"), 3, budget=1, loss=lambda module: module.training_step(tokens, 0)
    )
    trainer(tmp_path, LambdaCallback(on_train_batch_end=freeze), probe).fit(user, loader())
    measured = [row for row in rows(tmp_path) if row["sharpness/all/lambda_max"]]
    has_output = [bool(row["sharpness/scale_output/lambda_max"]) for row in measured]
    assert has_output == [True, False, False]


def test_callbacks_of_a_fit_that_failed_start_again(data: TokenDataModule, tmp_path: Path) -> None:
    monitor = TrainingMonitor(10)
    probe = Sharpness(("all",), 2, sequences=1)
    for name, fails in (("fails", 3), ("again", 99), ("fresh", 99)):
        if name == "fresh":
            monitor = TrainingMonitor(10)
            probe = Sharpness(("all",), 2, sequences=1)
        stop = LambdaCallback(on_train_batch_start=lambda *given, at=fails: 1 / (given[-1] - at))
        with pytest.raises(ZeroDivisionError) if fails == 3 else nullcontext():
            trainer(tmp_path / name, stop, monitor, probe, max_steps=4).fit(
                module(seed=fails), data
            )
    again = [row["train/loss"] for row in rows(tmp_path / "again")]
    assert again == [row["train/loss"] for row in rows(tmp_path / "fresh")] and any(again)
    assert probe.time.so_far.done == 2


class Silent(Foreign):
    """A user's module whose training step returns nothing: manual optimization."""

    def __init__(self, net: nn.Module):
        super().__init__(net)
        self.automatic_optimization = False

    def training_step(self, block: Tensor, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(block, batch_idx))
        optimizer.step()


def test_sharpness_of_a_loss_that_trains_is_refused(tmp_path: Path) -> None:
    tokens = blocks(2)
    probe = Sharpness(("all",), 2, loss=lambda module: module.training_step(tokens, 0))  # type: ignore[operator]
    with pytest.raises(ConfigError, match="^loss of Sharpness is"):
        trainer(tmp_path, probe).fit(Silent(foreign("applied")), loader())


def test_training_loss_of_half_precision_is_summed_in_float32() -> None:
    run: Any = SimpleNamespace(accumulate_grad_batches=4)
    user: Any = SimpleNamespace(automatic_optimization=True)
    loss = mean_loss(run, user, torch.tensor(0.5, dtype=torch.bfloat16))
    assert loss.dtype == torch.float32 and loss.item() == 2.0  # Lightning has divided it by 4
    nats = mean_loss(run, user, {"loss": torch.tensor(9.0), "nats": torch.tensor(3.0)})
    assert nats.item() == 3.0
    assert mean_loss(run, user, None) is None


class Frozen(Foreign):
    """A user's module without an optimizer."""

    def configure_optimizers(self) -> Any:
        return None


@pytest.mark.parametrize("kind", [Silent, Frozen])
def test_training_monitor_logs_what_a_custom_module_has(
    kind: type[Foreign], tmp_path: Path
) -> None:
    other: Any = L.LightningDataModule()
    other.train_dataloader = loader
    other.settings = 3  # a name of TokenDataModule too
    trainer(tmp_path, TrainingMonitor(1)).fit(kind(foreign("backbone")), datamodule=other)
    logged = tags(tmp_path)
    assert "throughput/steps_per_s" in logged
    assert ("lr" in logged) == (kind is Silent) and ("train/loss" in logged) == (kind is Frozen)


def test_training_monitor_keeps_the_sums_of_this_device_in_a_second_fit() -> None:
    """Those of a checkpoint are of all devices, and rank 0 alone continues them."""
    rank: Any = SimpleNamespace(
        global_step=3, max_steps=9, max_epochs=None, num_training_batches=9, estimated_stepping_batches=9, callbacks=[],
        is_global_zero=False, strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )  # fmt: skip
    monitor = TrainingMonitor(4)
    for restored in (False, True, False):
        monitor._sums = {"loss": torch.tensor(2.0)}
        if restored:
            monitor.load_state_dict({"sums": monitor._sums})
        MetricAccumulator.on_train_start(monitor, rank, None)  # type: ignore[arg-type]
        assert float(monitor._sums["loss"]) == (0 if restored else 2)


def test_callbacks_that_write_the_same_tags_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="BranchNorms"):
        trainer(tmp_path, BranchNorms(), BranchNorms(model="net")).fit(
            Foreign(foreign("backbone")), loader()
        )


def test_callbacks_model_without_parts_is_refused(data: TokenDataModule, tmp_path: Path) -> None:
    readers = (
        BranchNorms(),
        BranchNorms(model="nett"),
        Preconditioner(),
        RouterMonitor(),
        Sharpness(),
        ResidualMonitor(),
    )
    for callback in readers:
        with pytest.raises(ConfigError):
            trainer(tmp_path, callback).fit(Foreign(plain()), data)


class WithoutForward(L.LightningModule):
    """A user's module that calls its network in the steps."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def training_step(self, block: Tensor, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(
            self.net(block[:, :-1]).flatten(0, 1), block[:, 1:].flatten()
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def test_copying_monitor_needs_a_model_with_a_forward(
    data: TokenDataModule, tmp_path: Path
) -> None:
    def fit(name: str | None) -> None:
        monitor = lightning_sv.callbacks.CopyingMonitor(2, 2, model=name)
        trainer(tmp_path / str(name), monitor).fit(WithoutForward(foreign("backbone")), data)

    with pytest.raises(ConfigError, match="^model of CopyingMonitor"):
        fit(None)
    fit("net")
    assert "copying/repeat" in tags(tmp_path / "net")


@pytest.mark.parametrize("subsets", [("all", "scale_input"), ("scale_output",)])
def test_sharpness_of_scale_vectors_that_a_model_lacks_is_refused(
    subsets: tuple[str, ...], tmp_path: Path
) -> None:
    def fit(net: nn.Module, subsets: tuple[str, ...]) -> None:
        probe = Sharpness(
            subsets, 2, lanczos_steps=1, loss=lambda module: module.training_step(blocks(2), 0)
        )
        trainer(tmp_path, probe).fit(WithoutForward(net), loader())

    with pytest.raises(ConfigError, match="^the model of Sharpness is WithoutForward"):
        fit(plain(), subsets)
    fit(lightning_sv.Backbone(SIZES, "nop"), subsets)  # one config serves all strategies
    fit(plain(), ("all",))


def test_callbacks_of_training_ignore_validation(tmp_path: Path) -> None:
    run = trainer(
        tmp_path, Sharpness(), lightning_sv.TextSamples(3), lightning_sv.callbacks.CopyingMonitor()
    )
    assert run.validate(module(), loader(), verbose=False)


class TwoSteps(Manual):
    """Takes two optimizer steps per batch."""

    def training_step(self, block: Tensor, batch_idx: int) -> None:
        super().training_step(block, batch_idx)
        self.optimizers().step()  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", [PretrainModule, TwoSteps])
def test_training_monitor_speed_leaves_out_validation(
    kind: type[PretrainModule],
    data: TokenDataModule,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """16 tokens per batch of one second; a batch of validation takes 1,000 seconds."""
    clock = SimpleNamespace(seconds=0.0, perf_counter=lambda: clock.seconds)
    monkeypatch.setattr("lightning_sv.callbacks.training_monitor.time", clock)

    def wait(seconds: float) -> Any:
        return lambda *_: setattr(clock, "seconds", clock.seconds + seconds)

    waits = LambdaCallback(on_train_batch_start=wait(1), on_validation_batch_start=wait(1000))
    made = kind(SIZES, lr=0.01)
    trainer(tmp_path, TrainingMonitor(2), waits, val_check_interval=1).fit(made, data)
    speeds = [float(speed) for row in rows(tmp_path) if (speed := row["throughput/tokens_per_s"])]
    assert speeds == pytest.approx([16, 16])


def test_training_monitor_checkpoint_inside_a_step_has_complete_sums(
    data: TokenDataModule, tmp_path: Path
) -> None:
    keep = ModelCheckpoint(tmp_path, monitor="val/loss", filename="{step}", save_top_k=-1)
    run = trainer(
        tmp_path, TrainingMonitor(10), keep, accumulate_grad_batches=2, val_check_interval=3
    )
    run.fit(module(), data)
    state = torch.load(tmp_path / "step=1.ckpt", weights_only=True)["callbacks"]["TrainingMonitor"]
    assert int(state["sums"]["sequences"]) == 4
