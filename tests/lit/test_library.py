"""The module, the data module and the callbacks in a plain `lightning.Trainer`, as a library."""

import csv
import re
import runpy
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, LearningRateMonitor, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.tuner.tuning import Tuner
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MeanMetric, SumMetric

import lightning_sv
from lightning_sv import BackboneConfig, Preconditioner, PretrainModule, Sharpness, TokenDataModule, apply_strategy
from lightning_sv.callbacks import BranchNorms, ResidualMonitor, RouterMonitor, TrainingMonitor
from lightning_sv.callbacks.run_state import total_steps
from lightning_sv.corpus import RankShare
from lightning_sv.errors import ConfigError, RunError
from lightning_sv.nn import RouterConfig
from lightning_sv.optim import OptimConfig, ScheduleConfig
from lightning_sv.scale import ScaleOptions
from tests.conftest import thinned
from tests.lit.runs import differences, pages_of

#: Lightning warns about few workers, full folders and missing seeds
pytestmark = pytest.mark.filterwarnings("ignore")
EXAMPLES = Path(__file__).parents[2] / "examples"
OWN_MODULE = EXAMPLES / "own_lightning_module.py"
SIZES = BackboneConfig(d_model=16, n_layer=1, n_head=2, vocab_size=300)
MIXTURE = BackboneConfig(d_model=16, n_layer=1, n_head=2, vocab_size=300, n_expert=3, n_expert_active=2)
BIASED = replace(MIXTURE, router=RouterConfig(balance="bias", bias_rate=0.01))


def trainer(out: Path, *callbacks: L.Callback, **changes: Any) -> L.Trainer:
    made: dict[str, Any] = {
        "max_steps": 4, "accelerator": "cpu", "devices": 1, "log_every_n_steps": 1, "val_check_interval": 2,
        "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    return L.Trainer(**{**made, "logger": CSVLogger(out), "callbacks": list(callbacks), **changes})


def rows(out: Path) -> list[dict[str, str]]:
    with next(out.rglob("metrics.csv")).open() as file:
        return list(csv.DictReader(file))


def module(**changes: Any) -> PretrainModule:
    return PretrainModule(**{"backbone": SIZES, "scale": "hg+dp+or", "lr": 0.01, "seed": 0, **changes})


def blocks(n: int = 12) -> Tensor:
    return torch.randint(0, 300, (n, 9), generator=torch.Generator().manual_seed(0))


def loader() -> Any:
    return DataLoader(blocks(), batch_size=2)  # type: ignore[arg-type]


def noted(hook: str, value: Callable[..., Any]) -> tuple[list[Any], L.Callback]:
    """Return a list and a callback that appends `value` of the arguments of this hook."""
    found: list[Any] = []
    return found, LambdaCallback(**{hook: lambda *given: found.append(value(*given))})  # type: ignore[arg-type]


def tags(out: Path) -> set[str]:
    """Return the names of all logged values."""
    return {tag for row in rows(out) for tag, value in row.items() if value}


@pytest.fixture
def data(corpus: Path) -> TokenDataModule:
    return TokenDataModule(corpus, seq_len=8, batch_size=2, val_sequences=8, seed=0)


def test_package_every_public_name_is_listed_and_imports() -> None:
    assert set(lightning_sv.__all__) <= set(dir(lightning_sv))
    for name in lightning_sv.__all__:
        assert getattr(lightning_sv, name) is not None


def test_lightning_trainer_example_reads_its_best_checkpoint(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / "lightning_trainer.py"))["main"](str(corpus), str(tmp_path / "out"), steps=50)
    assert re.search(r"logits \(\d+, 64, 1024\)", capsys.readouterr().out)
    wanted = {"train/loss", "val/loss", "val/perplexity", "branch_norm/layer0/q_proj/effective", "sharpness/loss"}
    assert wanted <= tags(tmp_path / "out")


def test_own_lightning_module_example_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(OWN_MODULE))["main"](str(tmp_path), steps=40)
    losses = [float(row["loss"]) for row in rows(tmp_path) if row["loss"]]
    assert losses[-1] < losses[0] - 0.5 and "branch_norm/head/up_proj/gamma_out" in rows(tmp_path)[0]


def test_module_checkpoint_of_a_trainer_restores_it(data: TokenDataModule, tmp_path: Path) -> None:
    made, keep = module(), ModelCheckpoint(tmp_path, monitor="val/loss")
    for split in ("validate", "test"):  # a validated module trains afterwards
        (values,) = getattr(trainer(tmp_path / split, logger=False), split)(made, data, verbose=False)
        assert len(values) == 2  # loss and perplexity
    rates = LearningRateMonitor()
    run = trainer(tmp_path / "log", keep, L.pytorch.callbacks.EarlyStopping("val/loss"), rates)
    run.fit(made, data)
    assert {"train/loss", "val/loss", "val/perplexity"} <= run.logged_metrics.keys()
    assert {"lr-AdamW/input", "lr-AdamW/matrix"} <= rates.lrs.keys()
    assert run.callback_metrics["val/loss"] == run.validate(made, data, verbose=False)[0]["val/loss"]
    restored = PretrainModule.load_from_checkpoint(keep.best_model_path, weights_only=True)
    assert restored.settings.strategy == made.settings.strategy and restored.settings.lr == 0.01
    state = torch.load(keep.best_model_path, weights_only=True)["state_dict"]
    tokens = blocks()[:, :-1]
    made.load_state_dict(state)
    assert torch.equal(restored(tokens), made(tokens)) and restored(tokens).shape == (12, 8, 300)
    assert run.test(made, data, verbose=False)[0]["test/loss"] == run.validate(made, data, verbose=False)[0]["val/loss"]
    predicted: Any = run.predict(made, data)
    again: Any = run.predict(made, data.val_dataloader())
    assert predicted[0].shape[1:] == (8, 300) and torch.equal(torch.cat(predicted), torch.cat(again))


def test_load_from_checkpoint_arguments_keep_the_function(tmp_path: Path) -> None:
    made, path = module(), tmp_path / "a.ckpt"
    run = trainer(tmp_path, max_steps=1)
    run.fit(made, loader())
    run.save_checkpoint(path)
    load: Any = partial(PretrainModule.load_from_checkpoint, path, weights_only=True)
    more = {"optim": OptimConfig("muon", lr=0.1), "schedule": ScheduleConfig("wsd"), "compile": "block", "seed": 3}
    start = {"backbone": replace(SIZES, name="mine", init_std_by_role={"head": 0.01})}
    start["scale_options"] = ScaleOptions(initial_gamma_out=2.0)  # type: ignore[assignment]
    for changes in (more, {"lr": 0.1, "scale": "hg+dp+or+nowd", **start}):
        restored = load(**changes)
        assert differences(restored.state_dict(), made.state_dict()) == []
    assert restored.settings.lr == 0.1
    for key, changed in (
        ("scale", {"scale": "hg+dp+er"}),
        ("scale", {"scale": "hg+dnp+or"}),
        ("scale_options.placement_at.*", {"scale_options": ScaleOptions(placement_at={"lm_head": "dnp"})}),
        ("backbone.rope_theta", {"backbone": replace(SIZES, rope_theta=100.0)}),
    ):
        with pytest.raises(ConfigError, match=f"^{key} is "):
            load(**changed)


def test_module_without_a_trainer_builds_its_backbone(tmp_path: Path) -> None:
    tokens = blocks()[:, :-1]
    assert module().to("meta")(tokens.to("meta")).device.type == "meta"
    assert module().double()(tokens).dtype == torch.float64
    one, two = module(seed=1), module(seed=2)
    with torch.inference_mode():
        logits = one(tokens)
    two.load_state_dict(one.state_dict())
    torch.testing.assert_close(two(tokens), logits)
    trainer(tmp_path).fit(one, loader())
    for config in (SIZES, MIXTURE):
        made = module(backbone=config)
        with pytest.raises(ConfigError, match="configure_model"):
            made.training_step(blocks(), 0)
        with pytest.raises(ConfigError, match="configure_model"):
            apply_strategy(made, "hg", example=tokens)
        made.configure_model()
        assert made.training_step(blocks(), 0)["loss"].isfinite()


WRONG_BATCHES = [[blocks()], {"input_ids": blocks()}, blocks()[0], blocks().float(), blocks().short(), blocks()[:, :1]]


@pytest.mark.parametrize(
    ("key", "batch"),
    [
        *(("the batch", batch) for batch in WRONG_BATCHES),
        *(("the range", blocks() + off) for off in (-100, SIZES.vocab_size)),
    ],
)
def test_module_batch_that_is_no_block_of_ids_is_refused(key: str, batch: Any) -> None:
    for step in (module().training_step, module().predict_step):
        with pytest.raises(ConfigError, match=f"^{key}"):
            step(batch, 0)


def test_predict_masked_documents_give_the_logged_loss(data: TokenDataModule, tmp_path: Path) -> None:
    made, run = module(mask_documents=True, backbone=replace(SIZES, init_std=1.0)), trainer(tmp_path)
    (logged,) = run.test(made, data, verbose=False)
    logits: Any = run.predict(made, data)
    targets = torch.cat(list(data.predict_dataloader()))[:, 1:]
    loss = nn.functional.cross_entropy(torch.cat(logits).flatten(0, 1), targets.flatten())
    assert float(loss) == pytest.approx(logged["test/loss"], rel=1e-5)
    with pytest.raises(ConfigError, match="mask_documents"):  # of other data
        trainer(tmp_path).fit(module(mask_documents=True), loader())


def test_training_monitor_keeps_the_loss_for_other_callbacks(data: TokenDataModule, tmp_path: Path) -> None:
    monitors = ("train/loss", "branch_norm/mean/q_proj/effective")
    keep, norms = (ModelCheckpoint(tmp_path / tag, monitor=tag, every_n_train_steps=1) for tag in monitors)
    run = trainer(tmp_path, TrainingMonitor(1), BranchNorms(1), keep, norms)
    run.fit(module(), data)
    assert "scale: hg+dp+or" in next(tmp_path.rglob("hparams.yaml")).read_text()
    assert norms.best_model_path and keep.best_model_path
    assert {"train/loss", "val/loss"} <= run.progress_bar_metrics.keys()
    assert sum(bool(row["train/loss"]) for row in rows(tmp_path)) == 4  # each step once


EPOCHS = {"max_steps": -1, "max_epochs": 2, "val_check_interval": None}


def read_a_batch(trainer: Any, *_: Any) -> None:
    """Read a batch of a loader that nobody else reads."""
    next(iter(trainer.datamodule.train_dataloader()))


def adafactor(groups: Any, config: OptimConfig, lr: float) -> torch.optim.Optimizer:
    """Build an optimizer whose states differ in shape from their parameters."""
    return torch.optim.Adafactor([group.options("adafactor", config.weight_decay) for group in groups], lr=lr)


@pytest.mark.parametrize(
    ("optimizer", "changes"),
    [
        ("adamw", {"max_steps": 6}),
        ("adamw", EPOCHS | {"limit_train_batches": 6}),
        (f"{__name__}:adafactor", {"max_steps": 6}),
    ],
)
def test_trainer_resumed_equals_uninterrupted(
    optimizer: str, changes: dict[str, Any], corpus: Path, tmp_path: Path
) -> None:
    keep, resume = ModelCheckpoint(tmp_path, filename="half", every_n_train_steps=4), str(tmp_path / "half.ckpt")
    made, look = {}, LambdaCallback(on_fit_start=read_a_batch, on_train_batch_end=read_a_batch)
    parts = (("uninterrupted", [], None), ("half", [look, keep], None), ("resumed", [look], resume))
    for name, callbacks, checkpoint in parts:
        made[name] = module(optim=OptimConfig(optimizer))
        data = TokenDataModule(str(corpus), seq_len=8, batch_size=2, val_sequences=8, seed=0)
        run = trainer(tmp_path / name, *callbacks, accumulate_grad_batches=2, **changes)
        run.fit(made[name], data, ckpt_path=checkpoint, weights_only=True)
    position = data.state_dict()
    run.validate(made[name], data, verbose=False)
    assert position["epoch"] == ("max_epochs" in changes) * 2 and data.state_dict() == position
    assert differences(made["uninterrupted"].state_dict(), made["resumed"].state_dict()) == []
    again = module(optim=OptimConfig(optimizer))  # a new fit does not continue at the position of the resumed one
    trainer(tmp_path / "again", accumulate_grad_batches=2, **changes).fit(again, data)
    assert differences(made["uninterrupted"].state_dict(), again.state_dict()) == []
    run.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    with pytest.raises(ConfigError, match="weights only"):
        run.fit(made["half"], data, ckpt_path=tmp_path / "weights.ckpt", weights_only=True)


def test_trainer_resumed_with_a_different_length_has_its_rates_from_the_first_step(tmp_path: Path) -> None:
    optim, path = OptimConfig(lr=0.01, lr_factor_by_role={"input": 2.0}), tmp_path / "a.ckpt"
    seen, note = noted("on_before_optimizer_step", lambda *given: [group["lr"] for group in given[-1].param_groups])
    run = trainer(tmp_path)
    run.fit(module(optim=optim), loader())
    run.save_checkpoint(path)
    again = trainer(tmp_path, note, max_steps=8)
    again.fit(module(optim=optim), loader(), ckpt_path=path, weights_only=True)
    peaks = [group["initial_lr"] for group in again.optimizers[0].param_groups]
    assert 0.02 in peaks
    factors = [ScheduleConfig().factor(step, 8) for step in range(4, 8)]
    assert seen == [[pytest.approx(peak * factor) for peak in peaks] for factor in factors]


@pytest.mark.parametrize("way", ["exception", "scheduler"])
def test_trainer_resumed_inside_an_epoch_trains_every_batch_once(way: str, corpus: Path, tmp_path: Path) -> None:
    """After an error in a step, and after a step of an epoch with more accumulation than the first."""
    seen: dict[str, list[str]] = {"uninterrupted": [], "half": [], "resumed": []}
    for name, path in (("uninterrupted", None), ("half", None), ("resumed", tmp_path / "half.ckpt")):

        def note(run: Any, module: Any, outputs: Any, batch: Any, i: int, name: str = name) -> None:
            seen[name].append(str(batch.tolist()))
            if (name, way, run.current_epoch, i) == ("half", "scheduler", 1, 1):
                run.save_checkpoint(tmp_path / "half.ckpt")

        def fail(run: Any, module: Any, batch: Any, i: int, name: str = name) -> None:
            if (name, way, run.current_epoch, i) == ("half", "exception", 1, 2):
                raise KeyError("a bug of the user")

        notes = LambdaCallback(on_train_batch_end=note, on_train_batch_start=fail)
        keep = L.pytorch.callbacks.OnExceptionCheckpoint(tmp_path, filename="half")
        more: Any = keep if way == "exception" else L.pytorch.callbacks.GradientAccumulationScheduler({0: 1, 1: 2})
        limits = EPOCHS | {"limit_train_batches": 4}
        data = TokenDataModule(str(corpus), seq_len=8, batch_size=2, val_sequences=8, seed=0)
        with pytest.raises(KeyError) if (name, way) == ("half", "exception") else nullcontext():
            trainer(tmp_path / name, notes, more, **limits).fit(module(), data, ckpt_path=path, weights_only=True)
    assert len(seen["uninterrupted"]) == 8 and seen["resumed"] == seen["uninterrupted"][6:]


SCALER = torch.amp.GradScaler("cpu", init_scale=2.0**30)
CHANGES = [
    (EPOCHS, 12),
    (EPOCHS | {"limit_train_batches": 2}, 4),
    (EPOCHS | {"overfit_batches": 1}, 2),
    ({"fast_dev_run": True}, 1),
    ({"max_steps": -1, "max_time": {"seconds": 1}}, None),
    ({"precision": "bf16-true"}, 4),
    ({"plugins": [MixedPrecision("16-mixed", "cpu", SCALER)]}, 4),
    (EPOCHS | {"max_epochs": 3, "callbacks": [StochasticWeightAveraging(0.01), LearningRateMonitor()]}, 18),
]


@pytest.mark.parametrize(("changes", "steps"), thinned(CHANGES, [CHANGES[i] for i in (0, 3, 5, 6)], several=True))
def test_module_custom_loader_trains_to_the_end(changes: dict[str, Any], steps: int | None, tmp_path: Path) -> None:
    run, made = trainer(tmp_path, ModelCheckpoint(tmp_path), **changes), module()
    run.fit(made, loader(), loader())
    assert all(value.isfinite().all() for value in made.state_dict().values())
    assert run.global_step == steps if steps is not None else run.global_step > 1


@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
def test_half_precision_loss_of_nan_stops_or_skips(nonfinite: Any, tmp_path: Path) -> None:
    made = module(nonfinite=nonfinite)
    loss = made.loss

    def spoiled(block: Tensor) -> Any:
        nats, routings = loss(block)
        return nats * (float("nan") if made.global_step == 1 else 1), routings

    made.loss = spoiled  # type: ignore[method-assign]
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**40))  # overflows at first
    run = trainer(tmp_path, plugins=[plugin])
    with pytest.raises(RunError) if nonfinite == "stop" else nullcontext():
        run.fit(made, loader())
    assert run.global_step == (1 if nonfinite == "stop" else 4) and made.nonfinite.skipped == (nonfinite == "skip")


def test_half_precision_clips_true_gradients(tmp_path: Path) -> None:
    norms, note = noted("on_train_batch_end", lambda trainer, module, *_: module.grad_norm)
    for plugins in ([], [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**16))]):
        trainer(tmp_path, note, gradient_clip_val=1.0, plugins=plugins).fit(module(), loader())
    assert norms[4:] == pytest.approx(norms[:4], rel=0.02)


def test_clipping_by_value_neither_clips_the_norm_nor_hides_an_infinite_gradient(tmp_path: Path) -> None:
    largest, note = noted(
        "on_train_batch_end", lambda trainer, module, *_: max(p.grad.abs().max().item() for p in module.parameters())
    )
    clipped = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}
    trainer(tmp_path, note, **clipped).fit(module(), loader())
    assert largest == pytest.approx([1e-3] * 4)
    spoil = LambdaCallback(on_after_backward=lambda trainer, module: module.net.embed.weight.grad.fill_(torch.inf))
    with pytest.raises(RunError, match="finite"):
        trainer(tmp_path, spoil, **clipped).fit(module(), loader())


def test_interrupted_validation_is_not_part_of_the_next(tmp_path: Path) -> None:
    made, weights = module(), module(seed=1)
    weights.configure_model()
    with pytest.raises(ZeroDivisionError):
        trainer(tmp_path, LambdaCallback(on_validation_batch_end=lambda *_: 1 / 0)).validate(made, loader())
    made.load_state_dict(weights.state_dict())
    assert trainer(tmp_path).validate(made, loader()) == trainer(tmp_path).validate(weights, loader())


def test_interrupted_step_is_not_part_of_the_next_fit(tmp_path: Path) -> None:
    made, save = module(backbone=BIASED, seed=6), ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)

    def interrupt(trainer: L.Trainer, module: PretrainModule, out: Any, batch: Any, batch_idx: int) -> None:
        assert batch_idx < 9

    one_by_one = DataLoader(blocks(), batch_size=1)  # type: ignore[arg-type]
    several = {"accumulate_grad_batches": 4, "limit_val_batches": 0}
    with pytest.raises(AssertionError):
        trainer(tmp_path, save, LambdaCallback(on_train_batch_end=interrupt), **several).fit(made, one_by_one)
    (checkpoint,) = tmp_path.glob("*step=2.ckpt")
    ends = []
    for resumed in (made, module(backbone=BIASED, seed=6)):
        trainer(tmp_path / "again", max_steps=3, **several).fit(resumed, one_by_one, ckpt_path=str(checkpoint))
        ends.append(resumed.state_dict())
    assert differences(*ends) == []


def test_second_fit_of_a_trainer_continues_the_rates(tmp_path: Path) -> None:
    rates, note = noted("on_train_batch_end", lambda trainer, *_: trainer.optimizers[0].param_groups[0]["lr"])
    run, made = trainer(tmp_path, note, **EPOCHS | {"max_epochs": 1}), module()
    run.fit(made, loader())
    run.fit_loop.max_epochs = 2
    run.fit(made, loader())
    twice, rates[:] = rates[6:], []
    trainer(tmp_path, note, **EPOCHS).fit(module(), loader())
    assert twice == rates[6:]


def test_logger_prefix_is_in_all_tags(tmp_path: Path) -> None:
    logger, callbacks = TensorBoardLogger(tmp_path, prefix="run"), (TrainingMonitor(1), BranchNorms(2))
    trainer(tmp_path, *callbacks, Preconditioner(histograms=2), logger=logger).fit(module(), loader(), loader())
    written = EventAccumulator(logger.log_dir).Reload().Tags()
    drawn = {tag for charts in pages_of(Path(logger.log_dir)).values() for tags in charts.values() for tag in tags}
    assert drawn <= set(written["scalars"]) and all(tag.startswith("run-") for tag in written["histograms"])


def test_weight_averaging_averages_weights(tmp_path: Path) -> None:
    made = module()
    starts, note = noted("on_train_epoch_start", lambda _, module: parameters_to_vector(module.parameters()).detach())
    trainer(tmp_path, StochasticWeightAveraging(0.01, 0.5), note, **EPOCHS | {"max_epochs": 4}).fit(made, loader())
    torch.testing.assert_close(parameters_to_vector(made.parameters()), torch.stack(starts[1:]).mean(0))


def test_schedule_ends_with_the_last_step_of_changing_accumulation(tmp_path: Path) -> None:
    change = L.pytorch.callbacks.GradientAccumulationScheduler({0: 1, 1: 4})
    made, monitor = module(), TrainingMonitor(1000)
    trainer(tmp_path, change, monitor, **EPOCHS).fit(made, loader())
    assert monitor.lr == pytest.approx(0.05 * made.lr) and "train/loss" in tags(tmp_path)


def test_compiled_module_trains_as_the_plain_one(data: TokenDataModule, tmp_path: Path) -> None:
    names, (plain, compiled) = ("plain", "compiled"), (module(), module())
    for name, each in zip(names, (plain, torch.compile(compiled, backend="eager")), strict=True):
        trainer(tmp_path / name).fit(each, data)  # type: ignore[arg-type]
    losses = [[float(row["train/loss"]) for row in rows(tmp_path / name) if row["train/loss"]] for name in names]
    assert len(losses[0]) == 4 and losses[1] == pytest.approx(losses[0], rel=1e-5)
    weights = [parameters_to_vector(each.parameters()) for each in (plain, compiled)]
    torch.testing.assert_close(*weights, rtol=0, atol=0.002)  # four steps of 0.01


def test_copy_of_a_compiled_module_has_its_own_weights() -> None:
    with torch.compiler.set_stance("force_eager"):  # the fault is in Python
        made = module(compile="block")
        made.configure_model()
        copy = deepcopy(made)
        copy.loss(blocks())[0].backward()
    assert all(p.grad is not None for p in copy.parameters()) and all(p.grad is None for p in made.parameters())


def test_module_initial_weights_of_the_command_line_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="init_from"):
        trainer(tmp_path).fit(module(init_from="last"), loader())


def test_sharpness_of_roles_that_a_strategy_lacks_logs_the_loss(data: TokenDataModule, tmp_path: Path) -> None:
    trainer(tmp_path, Sharpness(("scale_output",), 2, sequences=2)).fit(module(scale="llama"), data)
    assert "sharpness/loss" in tags(tmp_path)


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
        self.lr_schedulers().step()  # type: ignore[union-attr]


@pytest.mark.parametrize(("kind", "warning"), [(OwnClipping, "do not stop the run"), (Manual, "move_bias")])
def test_own_optimization_logs_its_rates_and_losses(kind: type[PretrainModule], warning: str, tmp_path: Path) -> None:
    made = kind(replace(MIXTURE, router=RouterConfig(balance="bias")), lr=0.01)
    run = trainer(tmp_path, TrainingMonitor(1), LearningRateMonitor())
    with pytest.warns(UserWarning, match=warning):
        run.fit(made, loader(), loader())
    assert (run.callback_metrics["val/loss"] == 2) == (kind is OwnClipping)
    rates = [[row[tag] for row in rows(tmp_path) if row[tag]] for tag in ("lr", "lr-AdamW/matrix")]
    assert rates[0] == rates[1] and len(rates[0]) == 4
    assert "train/loss" in tags(tmp_path) and "grad_norm" not in tags(tmp_path) and not made.nonfinite.losses


@pytest.mark.parametrize("kind", ["applied", "unified"])
def test_graph_of_an_example_input_is_drawn(kind: str, tmp_path: Path) -> None:
    """It is a trace, which torch compares with a pass without gradients."""
    user: Any = Foreign(foreign(kind)) if kind == "applied" else module(scale=kind)
    user.example_input_array = blocks(2)[:, :-1]
    logger = TensorBoardLogger(tmp_path, log_graph=True)
    trainer(tmp_path, logger=logger, enable_model_summary=True).fit(user, loader())


def test_skipped_steps_leave_weights_and_biases_of_experts(tmp_path: Path) -> None:
    made = module(backbone=BIASED, nonfinite="skip")
    made.configure_model()
    before = deepcopy(made.state_dict())
    spoil = LambdaCallback(on_after_backward=lambda trainer, module: module.net.embed.weight.grad.mul_(torch.nan))
    trainer(tmp_path, spoil).fit(made, loader())
    assert made.nonfinite.skipped == 4 and differences(before, made.state_dict()) == []


class Measured(PretrainModule):
    """Logs sums and values of every micro-batch, and returns the loss of a step."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.blocks, self.mean, self.all = SumMetric(), MeanMetric(), CatMetric()

    def training_step(self, block: Tensor, batch_idx: int) -> Any:
        out = super().training_step(block, batch_idx)
        self.blocks.update(len(block))
        self.log("blocks", self.blocks, on_step=False, on_epoch=True)
        self.log("mean", self.mean(out["nats"]))
        self.all.update(out["nats"])
        return out


@pytest.mark.parametrize("method", ["exact", "difference"])
def test_probe_leaves_metrics_of_a_training_step_and_biases_of_experts(method: Any, tmp_path: Path) -> None:
    seen, ends = [], []
    loss: Any = lambda module: module.training_step(blocks(), 0)  # noqa: E731
    for name, probes in (("plain", 0), ("probed", 1)):
        made = Measured(backbone=BIASED, lr=0.01, seed=0)
        probe = Sharpness(("scale_input",), 3, method=method, lanczos_steps=2, loss=loss)
        probe.clock = lambda: 0.0  # its budget would skip the probe between the first and the last step
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

    for name, loss in (("own", None), ("given", lambda module: module.loss(data.batches.held_out(2))[0])):
        probe = Sharpness(("all",), 2, sequences=2, loss=loss)
        trainer(tmp_path / name, probe, max_steps=1).fit(Frozen(SIZES, lr=0.01, seed=0), data)
    own, given = (float(rows(tmp_path / name)[0]["sharpness/all/trace"]) for name in ("own", "given"))
    assert own == pytest.approx(given, rel=1e-3)


def test_data_module_takes_the_accumulation_of_the_trainer(data: TokenDataModule, corpus: Path, tmp_path: Path) -> None:
    run = trainer(tmp_path, accumulate_grad_batches=3, val_check_interval=6)
    run.fit(module(), data)
    assert run.accumulate_grad_batches == 3 and run.val_check_interval == 6 and data.batches is not None
    assert data.batches.global_batch == 6
    wrong = TokenDataModule(str(corpus), seq_len=8, batch_size=2, global_batch=8)
    with pytest.raises(ConfigError, match="accumulate_grad_batches"):
        trainer(tmp_path, accumulate_grad_batches=3).fit(module(), wrong)


def test_tuner_sets_the_batch_and_rate_that_are_trained(corpus: Path, data: TokenDataModule, tmp_path: Path) -> None:
    run, made = trainer(tmp_path, TrainingMonitor(1), default_root_dir=tmp_path), module()
    Tuner(run).scale_batch_size(made, datamodule=data, max_trials=3, steps_per_trial=1)
    Tuner(run).lr_find(made, data, num_training=20)
    assert data.batch_size == 8 and made.lr != 0.01 and made.hparams["optim"]["lr"] == made.lr
    run.fit(made, data)
    other = module(lr=made.lr)
    trainer(tmp_path).fit(other, TokenDataModule(corpus, seq_len=8, batch_size=8, val_sequences=8, seed=0))
    assert all(value.equal(other.state_dict()[key]) for key, value in made.state_dict().items())
    again, monitor = module(), TrainingMonitor(1)
    finder = L.pytorch.callbacks.LearningRateFinder(num_training_steps=20)
    keep = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    trainer(tmp_path, monitor, finder, keep, default_root_dir=tmp_path).fit(again, loader())
    last = again.lr * again.settings.schedule.factor(3, 4)
    assert again.lr != 0.01 and monitor.lr == pytest.approx(last)
    saved, resumed = str(tmp_path / "step=2.ckpt"), TrainingMonitor(1)
    trainer(tmp_path, resumed).fit(PretrainModule.load_from_checkpoint(saved), loader(), ckpt_path=saved)
    assert resumed.lr == pytest.approx(last)
    with pytest.raises(ConfigError, match="^a callback is LearningRateFinder"):
        trainer(tmp_path, finder, default_root_dir=tmp_path).fit(module(lr=again.lr), loader(), ckpt_path=saved)


@pytest.mark.parametrize(
    ("changes", "distinct"),
    [({"overfit_batches": 2}, 2), ({"limit_train_batches": 2, "reload_dataloaders_every_n_epochs": 1}, 6)],
)
def test_data_module_epochs_repeat_batches_only_to_overfit(
    changes: dict[str, Any], distinct: int, data: TokenDataModule, tmp_path: Path
) -> None:
    seen, note = noted("on_train_batch_start", lambda trainer, module, batch, i: str(batch.tolist()))
    trainer(tmp_path, note, max_steps=-1, max_epochs=3, val_check_interval=None, **changes).fit(module(), data)
    assert len(seen) == 6 and len(set(seen)) == distinct


def test_data_module_without_a_seed_has_one_order(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def order() -> list[int]:
        torch.seed()  # as in a new process
        data = TokenDataModule(str(corpus), seq_len=8, batch_size=2)
        data.setup("fit")
        assert next(iter(data.val_dataloader())).shape[1:] == (9,)
        return data.train_dataloader().order.sequences(0, 0)

    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    assert order() == order()
    orders = [order()]
    for seed in (7, 7 + 2**31):
        monkeypatch.setenv("PL_GLOBAL_SEED", str(seed))  # as seed_everything does
        orders.append(order())
    assert len(set(map(tuple, orders))) == 3


def test_validation_of_devices_with_unequal_shares_has_equal_batches(
    data: TokenDataModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_sv.lit.data.VALIDATION_TOKENS", 1)
    data.batches.val_sequences = 3
    shares = []
    for rank in range(2):
        data._share = RankShare(2, 1, rank, 2)
        shares.append(list(data.val_dataloader()))
    assert [[len(batch) for batch in batches] for batches in shares] == [[2], [1]]
    assert len(torch.cat([*shares[0], *shares[1]]).unique(dim=0)) == 3


class Foreign(L.LightningModule):
    """A user's module, with a loss of its own."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, tokens: Tensor) -> Any:
        return self.net(tokens)

    def training_step(self, block: Tensor, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self(block[:, :-1]).flatten(0, 1), block[:, 1:].flatten())
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


@pytest.mark.parametrize("kind", thinned(["applied", "backbone", "mixture"], ["applied", "mixture"]))
@pytest.mark.parametrize(
    ("name", "method"), thinned([(None, "exact"), ("net", "difference")], [("net", "difference")], several=True)
)
def test_callbacks_leave_custom_training_unchanged(kind: str, name: str | None, method: Any, tmp_path: Path) -> None:
    user = Foreign(foreign(kind))
    before = {key: value.clone() for key, value in user.state_dict().items()}

    def loss(user: Any) -> Tensor:
        return user.training_step(blocks(4), 0)

    probe = Sharpness(("all", "scale_input"), points=3, loss=loss, model=name, method=method)
    probe.clock = lambda: 0.0  # its budget would skip the probe in the middle
    monitors = [RouterMonitor(2, model=name)] * (kind == "mixture")
    callbacks = [TrainingMonitor(2), BranchNorms(2, model=name), Preconditioner(2, model=name), probe, *monitors]
    trainer(tmp_path / "user", *callbacks, accumulate_grad_batches=2).fit(user, loader())
    logged = tags(tmp_path / "user")
    branch = {"applied": "head/up_proj", "backbone": "layer0/up_proj", "mixture": "layer0/expert_up_proj"}[kind]
    wanted = {"train/loss", "lr", "throughput/steps_per_s", f"branch_norm/{branch}/effective", "sharpness/all/trace"}
    wanted |= {f"preconditioner/{branch}/drift_in", "sharpness/scale_input/lambda_max"}
    wanted |= {"moe/layer0/load_max"} if kind == "mixture" else set()
    assert wanted <= logged, wanted - logged
    quiet = Foreign(foreign(kind))
    quiet.load_state_dict(before)
    trainer(tmp_path / "quiet", accumulate_grad_batches=2).fit(quiet, loader())
    assert differences(quiet.state_dict(), user.state_dict()) == []  # the probes leave training alone
    losses = [[row["loss"] for row in rows(out) if row["loss"]] for out in (tmp_path / "user", tmp_path / "quiet")]
    assert losses[0] == losses[1]
    (mean,) = {row["train/loss"] for row in rows(tmp_path / "user") if row["step"] == "2" and row["train/loss"]}
    assert float(mean) == pytest.approx(float(losses[0][0]), rel=0.1)


def test_router_monitor_names_the_mixtures_of_equal_block_numbers_by_their_path() -> None:
    user: Any = Foreign(nn.ModuleDict({name: foreign("mixture") for name in ("encoder", "decoder")}))
    monitor = RouterMonitor()
    monitor.on_fit_start(None, user)  # type: ignore[arg-type]
    charts = set(monitor.charts()["expert load"])
    assert {"layer0/net_encoder_layers_ffn", "layer0/net_decoder_layers_ffn"} <= charts
    assert len(charts) == 2 * MIXTURE.n_layer


class Teacher(Foreign):
    """Its second network runs first, and the third one is in evaluation mode."""

    def forward(self, tokens: Tensor) -> Any:
        a, b, teacher = self.net.values()  # type: ignore[operator,union-attr]
        teacher.eval()
        return b(tokens) + a(tokens) + teacher(tokens)


def test_router_monitor_loads_are_those_of_the_named_mixture(tmp_path: Path) -> None:
    config = replace(MIXTURE, router=RouterConfig(balance="bias"))
    user = Teacher(nn.ModuleDict({name: lightning_sv.Backbone(config, "hg", seed=0) for name in "abc"}))
    user.net["a"].layers[0].ffn.router_bias[0] = 9  # type: ignore[index,union-attr]
    trainer(tmp_path, RouterMonitor(1), max_steps=1).fit(user, loader())
    (logged,) = (row for row in rows(tmp_path) if row["moe/mean/entropy"])
    assert float(logged["moe/layer0/net_a_layers_ffn/load/expert0"]) == 1.5  # of 3 experts, 2 active
    assert float(logged["moe/layer0/net_b_layers_ffn/load/expert0"]) < 1.5
    assert not [tag for tag in logged if "net_c" in tag]


def test_callbacks_of_a_fit_that_failed_start_again(data: TokenDataModule, tmp_path: Path) -> None:
    monitor, probe = TrainingMonitor(10), Sharpness(("all",), 2, sequences=1)
    for name, fails in (("fails", 3), ("again", 99), ("fresh", 99)):
        if name == "fresh":
            monitor, probe = TrainingMonitor(10), Sharpness(("all",), 2, sequences=1)
        stop = LambdaCallback(on_train_batch_start=lambda *given, at=fails: 1 / (given[-1] - at))
        with pytest.raises(ZeroDivisionError) if fails == 3 else nullcontext():
            trainer(tmp_path / name, stop, monitor, probe, max_steps=4).fit(module(seed=fails), data)
    again, fresh = ([row["train/loss"] for row in rows(tmp_path / name)] for name in ("again", "fresh"))
    assert again == fresh and any(fresh) and probe._state.done == 2


class OwnStep(PretrainModule):
    """A subclass with its own training step, which reports no routings, and an optimizer, which knows no roles."""

    def training_step(self, block: Tensor, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self(block[:, :-1]).flatten(0, 1), block[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def test_module_with_own_step_and_optimizer_trains_and_resumes(data: TokenDataModule, tmp_path: Path) -> None:
    first, resumed = (OwnStep(backbone=MIXTURE, lr=0.01, seed=0) for _ in range(2))
    keep = ModelCheckpoint(tmp_path, filename="half", every_n_train_steps=2, save_top_k=1)
    callbacks = [keep, RouterMonitor(1), TrainingMonitor(1)]
    trainer(tmp_path / "a", *callbacks, gradient_clip_val=1.0, max_steps=2).fit(first, data)
    assert {"train/loss", "moe/layer0/load_max"} <= tags(tmp_path / "a")
    assert any(float(row["grad_norm"] or 0) > 0 for row in rows(tmp_path / "a"))
    assert not any(child._forward_hooks for child in first.modules())
    trainer(tmp_path / "b", max_steps=4).fit(resumed, data, ckpt_path=str(tmp_path / "half.ckpt"), weights_only=True)
    assert resumed.trainer.global_step == 4
    first.net.embed.weight.data.fill_(float("nan"))
    with pytest.raises(RunError):
        trainer(tmp_path / "nan").fit(first, data)


class Wider(PretrainModule):
    """A subclass that saves its arguments in the usual way, has a layer of its own and freezes a different one."""

    def __init__(self, width: int = 1, **kwargs: Any):
        super().__init__(**kwargs)
        self.save_hyperparameters()
        self.extra = nn.Linear(width, width)

    def configure_model(self) -> None:
        super().configure_model()
        self.net.embed.requires_grad_(False)


def test_own_arguments_are_restored(data: TokenDataModule, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made, keep = Wider(width=3, backbone=SIZES, lr=0.01), ModelCheckpoint(tmp_path)
    trainer(tmp_path / "log", keep).fit(made, data)
    assert "extra.weight is not trained" in caplog.text
    (logged,) = (tmp_path / "log").rglob("hparams.yaml")
    assert "d_model: 16" in logged.read_text()
    restored = Wider.load_from_checkpoint(keep.best_model_path, weights_only=True)
    trainer(tmp_path / "more", max_steps=5).fit(restored, data, ckpt_path=keep.best_model_path, weights_only=True)
    assert torch.equal(restored.net.embed.weight, made.net.embed.weight)
    assert restored.extra.in_features == 3 and restored.settings.backbone == SIZES and restored.settings.lr == 0.01


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


class Twice(Silent):
    """A user's module with two optimizers, which step in each batch."""

    def training_step(self, block: Tensor, batch_idx: int) -> Any:
        optimizers: Any = self.optimizers()
        self.manual_backward(Foreign.training_step(self, block, batch_idx))
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([parameter], lr=1e-3) for parameter in list(self.parameters())[:2]]


def test_steps_of_several_optimizers_are_counted(tmp_path: Path) -> None:
    planned, note = noted("on_train_start", lambda trainer, _: total_steps(trainer))
    preconditioner = Preconditioner(histograms=4, model="net")
    run = trainer(tmp_path, note, preconditioner, logger=TensorBoardLogger(tmp_path), **EPOCHS)
    run.fit(Twice(foreign("backbone")), loader())
    assert planned == [run.global_step] == [24]
    reader = EventAccumulator(run.log_dir, size_guidance={"histograms": 0}).Reload()
    assert [event.step for event in reader.Histograms(reader.Tags()["histograms"][0])] == [0, 2, 6, 24]  # 0 1 5 24


class Frozen(Foreign):
    """A user's module without an optimizer."""

    def configure_optimizers(self) -> Any:
        return None


@pytest.mark.parametrize("kind", [Silent, Frozen])
def test_training_monitor_logs_what_a_custom_module_has(kind: type[Foreign], tmp_path: Path) -> None:
    other: Any = L.LightningDataModule()
    other.train_dataloader = loader
    other.batches = 3  # a name of TokenDataModule too
    trainer(tmp_path, TrainingMonitor(1)).fit(kind(foreign("backbone")), datamodule=other)
    logged = tags(tmp_path)
    assert "throughput/steps_per_s" in logged
    assert ("lr" in logged) == (kind is Silent) and ("train/loss" in logged) == (kind is Frozen)


def test_callbacks_that_write_the_same_tags_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="BranchNorms"):
        trainer(tmp_path, BranchNorms(), BranchNorms(model="net")).fit(Foreign(foreign("backbone")), loader())


READERS = [BranchNorms(), BranchNorms(model="nett"), Preconditioner(), RouterMonitor(), Sharpness(), ResidualMonitor()]


@pytest.mark.parametrize("callback", READERS)
def test_callbacks_model_without_parts_is_refused(callback: L.Callback, data: TokenDataModule, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        trainer(tmp_path, callback).fit(Foreign(plain()), data)


def test_callbacks_of_training_ignore_validation(tmp_path: Path) -> None:
    run = trainer(tmp_path, Sharpness(), lightning_sv.TextSamples(3), lightning_sv.callbacks.CopyingMonitor())
    assert run.validate(module(), loader(), verbose=False)


class TwoSteps(Manual):
    """Takes two optimizer steps per batch."""

    def training_step(self, block: Tensor, batch_idx: int) -> None:
        super().training_step(block, batch_idx)
        self.optimizers().step()  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", [PretrainModule, TwoSteps])
def test_training_monitor_speed_leaves_out_validation(
    kind: type[PretrainModule], data: TokenDataModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def test_training_monitor_checkpoint_inside_a_step_has_complete_sums(data: TokenDataModule, tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path, monitor="val/loss", filename="{step}", save_top_k=-1)
    run = trainer(tmp_path, TrainingMonitor(10), keep, accumulate_grad_batches=2, val_check_interval=3)
    run.fit(module(), data)
    state = torch.load(tmp_path / "step=1.ckpt", weights_only=True)["callbacks"]["TrainingMonitor"]
    assert int(state["sums"]["sequences"]) == 4


def test_lightning_cli_trains(corpus: Path, tmp_path: Path) -> None:
    words = ["fit", "--model.backbone.d_model=16", "--model.backbone.n_layer=1", "--model.backbone.n_head=2"]
    words += ["--model.backbone.vocab_size=300", "--model.lr=0.01", f"--data.corpus={corpus}", "--data.seq_len=8"]
    words += ["--data.batch_size=2", "--data.val_sequences=4", "--trainer.max_steps=2", "--trainer.accelerator=cpu"]
    words += [f"--trainer.default_root_dir={tmp_path}", "--trainer.enable_progress_bar=false", "--trainer.devices=1"]
    done = LightningCLI(PretrainModule, TokenDataModule, args=words, auto_configure_optimizers=False)
    assert done.trainer.global_step == 2 and "train/loss" in done.trainer.callback_metrics


def test_from_preset_conf_of_a_different_project_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "conf/model").mkdir(parents=True)
    (tmp_path / "conf/base.yaml").write_text("model: {name: resnet50}\n")
    (tmp_path / "conf/model/small.yaml").write_text("model: resnet50\n")
    (tmp_path / "conf/model/own.yaml").write_text("_target_: net\n")
    wanted = PretrainModule.from_preset("small").hparams
    monkeypatch.chdir(tmp_path)
    assert PretrainModule.from_preset("small").hparams == wanted
    with pytest.raises(ConfigError, match="^model in conf/model/own.yaml is"):
        PretrainModule.from_preset("own")


def test_from_preset_changes_apply_and_unknown_ones_are_refused() -> None:
    made = PretrainModule.from_preset("tiny", scale="llama", d_model=32, lr=0.5)
    config = made.settings.backbone
    assert (config.d_model, config.n_layer, made.settings.lr, str(made.settings.strategy)) == (32, 2, 0.5, "llama")
    for name, changes in (("tinny", {}), ("tiny", {"width": 3})):
        with pytest.raises(ConfigError, match="mean 'tiny'|width"):
            PretrainModule.from_preset(name, **changes)
