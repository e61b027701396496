"""Hooks of a subclass that replace those of `PretrainModule` without a call of `super()`."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.utils.data import DataLoader

from lightning_sv import PretrainModule
from lightning_sv.callbacks import TrainingMonitor
from lightning_sv.errors import ConfigError, RunError
from lightning_sv.optim import OptimConfig, role_groups
from tests.lit.own_trainer import BIASED, SIZES, blocks, column, loader, tags, trainer
from tests.lit.runs import differences

pytestmark = pytest.mark.filterwarnings("ignore")
LIMIT = 0.01


def gradient_norm(module: PretrainModule) -> float:
    gradients = [each.grad for each in module.parameters() if each.grad is not None]
    return get_total_norm(gradients).item()


class LouderGradients(PretrainModule):
    """Changes the gradients between the guard's check and clipping."""

    clipped: list[float]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad *= 100

    def configure_gradient_clipping(self, *arguments: Any, **options: Any) -> None:
        super().configure_gradient_clipping(*arguments, **options)
        self.clipped.append(gradient_norm(self))


class Louder(L.Callback):
    """The same by a callback that comes after the guard."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        LouderGradients.on_before_optimizer_step(pl_module, optimizer)


class LouderByCallback(LouderGradients):
    on_before_optimizer_step = PretrainModule.on_before_optimizer_step

    def configure_callbacks(self) -> list[L.Callback]:
        return [*super().configure_callbacks(), Louder()]


class ManualClipping(PretrainModule):
    """Clips before the guard's check, which follows in the optimizer's step."""

    automatic_optimization = False
    clipped: list[float]

    def training_step(self, block: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.training_loss(block)[0]
        self.manual_backward((batch_idx + 1) * loss)  # each step has a different norm
        self.clip_gradients(optimizer, gradient_clip_val=LIMIT)
        self.clipped.append(gradient_norm(self))
        optimizer.step()


@pytest.mark.parametrize(
    ("kind", "limit"),
    [(LouderGradients, LIMIT), (LouderByCallback, LIMIT), (ManualClipping, None)],
)
def test_clipping_uses_the_norm_of_the_gradients_of_the_step(
    kind: Any, limit: float | None, tmp_path: Path
) -> None:
    made = kind(SIZES, lr=0.01, seed=0)
    made.clipped = []
    trainer(tmp_path, gradient_clip_val=limit).fit(made, loader(), loader())
    assert made.clipped == pytest.approx([LIMIT] * 4, rel=1e-3)


class OwnGroups(PretrainModule):
    """Has an optimizer of its own, with and without the roles by which gradients are clipped."""

    with_roles: bool

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups = role_groups(self.net, frozenset())
        options = [group.options("sgd", weight_decay=0.0) for group in groups]
        if not self.with_roles:
            for each in options:
                del each["role"]
        return torch.optim.SGD(options, lr=0.01)


@pytest.mark.parametrize("with_roles", [True, False])
def test_clipping_by_role_needs_an_optimizer_with_roles(with_roles: bool, tmp_path: Path) -> None:
    made = OwnGroups(SIZES, "hg", optim=OptimConfig(lr=0.01, clip_by_role={"input": LIMIT}))
    made.with_roles = with_roles
    refused = pytest.raises(ConfigError, match="clip_by_role")
    with nullcontext() if with_roles else refused:
        trainer(tmp_path).fit(made, loader(), loader())
    assert made.trainer.global_step == (4 if with_roles else 0)


class OwnStep(PretrainModule):
    def training_step(self, block: Tensor, batch_idx: int) -> Tensor:  # type: ignore[override]
        return self.training_loss(block)[0]


class UncountedStep(PretrainModule):
    def training_step(self, block: Tensor, batch_idx: int) -> Tensor:  # type: ignore[override]
        return self.loss(block)[0]


def test_own_step_moves_the_biases_of_experts_or_is_refused(tmp_path: Path) -> None:
    expected = PretrainModule(BIASED, lr=0.01, seed=0)
    own = OwnStep(BIASED, lr=0.01, seed=0)
    for made in (expected, own):
        trainer(tmp_path).fit(made, loader(), loader())
    assert differences(own.state_dict(), expected.state_dict()) == []

    with pytest.raises(ConfigError, match=r"router\.balance"):
        trainer(tmp_path).fit(UncountedStep(BIASED, lr=0.01), loader(), loader())
    trainer(tmp_path).fit(UncountedStep(SIZES, lr=0.01), loader(), loader())


class TwoOptimizers(PretrainModule):
    """One backward pass, two optimizers; returns nothing."""

    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        vectors = [each for name, each in self.net.named_parameters() if "scale" in name]
        others = [each for name, each in self.net.named_parameters() if "scale" not in name]
        return [torch.optim.SGD(vectors, lr=0.01), torch.optim.SGD(others, lr=0.01)]

    def training_step(self, block: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(self.training_loss(block)[0])
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()


class SkippingStep(PretrainModule):
    """Leaves out the first batch."""

    def training_step(self, block: Tensor, batch_idx: int) -> Any:
        return self.training_loss(block)[0] if batch_idx else None


class OwnClipping(PretrainModule):
    """It also logs its own validation loss."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, 1.0, "norm")

    def validation_step(self, block: Tensor, batch_idx: int) -> None:
        self.log("val/loss", 2.0)


class Manual(PretrainModule):
    automatic_optimization = False

    def training_step(self, block: Tensor, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(block, batch_idx)["loss"])
        optimizer.step()
        self.lr_schedulers().step()


#: a subclass, its steps, and Lightning's tag of its rates
STEPS = [
    (OwnClipping, 4, "lr-AdamW/matrix"),
    (Manual, 4, "lr-AdamW/matrix"),
    (SkippingStep, 4, "lr-AdamW/matrix"),
    (TwoOptimizers, 8, "lr-SGD"),
]


@pytest.mark.parametrize(("kind", "steps", "tag"), STEPS)
def test_own_optimization_is_guarded_and_logs_its_rates_and_losses(
    kind: type[PretrainModule], steps: int, tag: str, tmp_path: Path
) -> None:
    made = kind(BIASED, lr=0.01, seed=0)
    run = trainer(tmp_path, TrainingMonitor(1), LearningRateMonitor(), max_steps=steps)
    run.fit(made, loader(), loader())
    biases = [value for key, value in made.state_dict().items() if key.endswith("router_bias")]
    assert biases and all(value.any() for value in biases)
    assert (run.callback_metrics["val/loss"] == 2) == (kind is OwnClipping)
    assert ("val/perplexity" in tags(tmp_path)) != (kind is OwnClipping)
    rates = column(tmp_path, "lr")
    # Lightning counts steps of both optimizers
    assert len(rates) == 4 and rates == column(tmp_path, tag)[:4]
    assert "grad_norm" in tags(tmp_path)
    assert ("train/loss" in tags(tmp_path)) == (kind is not TwoOptimizers)  # which returns none
    made.net.embed.weight.data.fill_(float("nan"))
    with pytest.raises(RunError, match="finite"):
        trainer(tmp_path / "nan").fit(made, loader())


class OwnValidationStart(PretrainModule):
    def on_validation_epoch_start(self) -> None:
        pass


def test_each_validation_has_its_own_mean(tmp_path: Path) -> None:
    made = OwnValidationStart(SIZES, lr=0.01, seed=0)
    run = trainer(tmp_path)
    run.fit(made, loader(), DataLoader(blocks(4), batch_size=2))  # the second validation is last
    with torch.no_grad():
        expected = made.loss(blocks(4))[0].item()
    assert run.callback_metrics["val/loss"] == pytest.approx(expected, rel=1e-5)


class OwnStart(PretrainModule):
    def on_fit_start(self) -> None:
        pass


def test_initial_weights_are_checked_next_to_an_own_start(tmp_path: Path) -> None:
    made = OwnStart(SIZES, lr=0.01, init_from="no/run")
    with pytest.raises(ConfigError, match="init_from"):
        trainer(tmp_path).fit(made, loader(), loader())


class OwnCheckpoint(PretrainModule):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = "saved"

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.mine = checkpoint["mine"]


def test_checkpoint_of_own_hooks_has_the_settings(tmp_path: Path) -> None:
    path = tmp_path / "own.ckpt"
    run = trainer(tmp_path)
    run.fit(OwnCheckpoint(SIZES, lr=0.01), loader())
    run.save_checkpoint(path)

    loaded = OwnCheckpoint.load_from_checkpoint(path)
    assert loaded.mine == "saved" and loaded.lr == 0.01
    resumed = trainer(tmp_path, max_steps=6)
    resumed.fit(OwnCheckpoint(SIZES, lr=0.01), loader(), ckpt_path=path, weights_only=True)
    assert resumed.global_step == 6
    changed = OwnCheckpoint(SIZES, lr=0.02)
    with pytest.raises(ConfigError, match=r"optim\.lr"):
        trainer(tmp_path, max_steps=6).fit(changed, loader(), ckpt_path=path, weights_only=True)
    with pytest.raises(ConfigError, match="scale"):  # also of a class without such hooks
        PretrainModule.load_from_checkpoint(path, scale="hg+dp")
