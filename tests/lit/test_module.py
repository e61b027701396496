"""The module in a plain `lightning.Trainer`."""

from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
)
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader

from lightning_sv import PretrainModule, TokenDataModule, apply_strategy
from lightning_sv.callbacks import RouterMonitor, TrainingMonitor
from lightning_sv.errors import ConfigError, RunError
from lightning_sv.lit.checkpoint.last_checkpoint import LastCheckpoint
from lightning_sv.nn import RouterConfig, document_ids
from lightning_sv.optim import OptimConfig, ScheduleConfig
from lightning_sv.scale import ScaleOptions
from tests.conftest import thinned
from tests.lit.own_trainer import (
    BIASED,
    EPOCHS,
    MIXTURE,
    SIZES,
    blocks,
    loader,
    module,
    noted,
    rows,
    tags,
    trainer,
)
from tests.lit.runs import differences

#: Lightning warns about few workers, full folders and missing seeds
pytestmark = pytest.mark.filterwarnings("ignore")


def test_module_checkpoint_of_a_trainer_restores_it(data: TokenDataModule, tmp_path: Path) -> None:
    made = module()
    keep = ModelCheckpoint(tmp_path, monitor="val/loss")
    for split in ("validate", "test"):  # a validated module trains afterwards
        (values,) = getattr(trainer(tmp_path / split, logger=False), split)(
            made, data, verbose=False
        )
        assert len(values) == 2  # loss and perplexity
    rates = LearningRateMonitor()
    run = trainer(tmp_path / "log", keep, L.pytorch.callbacks.EarlyStopping("val/loss"), rates)
    run.fit(made, data)
    assert {"train/loss", "val/loss", "val/perplexity"} <= run.logged_metrics.keys()
    assert {"lr-AdamW/input", "lr-AdamW/matrix"} <= rates.lrs.keys()
    assert (
        run.callback_metrics["val/loss"] == run.validate(made, data, verbose=False)[0]["val/loss"]
    )
    restored = PretrainModule.load_from_checkpoint(keep.best_model_path, weights_only=True)
    assert restored.settings.strategy == made.settings.strategy and restored.lr == 0.01
    state = torch.load(keep.best_model_path, weights_only=True)["state_dict"]
    tokens = blocks()[:, :-1]
    made.load_state_dict(state)
    assert torch.equal(restored(tokens), made(tokens)) and restored(tokens).shape == (12, 8, 300)
    assert (
        run.test(made, data, verbose=False)[0]["test/loss"]
        == run.validate(made, data, verbose=False)[0]["val/loss"]
    )


def test_load_from_checkpoint_arguments_keep_the_function(tmp_path: Path) -> None:
    made = module()
    path = tmp_path / "a.ckpt"
    run = trainer(tmp_path, max_steps=1)
    run.fit(made, loader())
    run.save_checkpoint(path)
    load: Any = partial(PretrainModule.load_from_checkpoint, path, weights_only=True)
    more = {
        "optim": OptimConfig("muon", lr=0.1),
        "schedule": ScheduleConfig("wsd"),
        "compile": "block",
        "seed": 3,
    }
    start = {"backbone": replace(SIZES, name="mine", init_std_by_role={"head": 0.01})}
    start["scale_options"] = ScaleOptions(initial_gamma_out=2.0)
    for changes in (more, {"lr": 0.1, "scale": "hg+dp+or+nowd", **start}):
        restored = load(**changes)
        assert differences(restored.state_dict(), made.state_dict()) == []
    assert restored.lr == 0.1
    logged = load(hparams_file=next(tmp_path.rglob("hparams.yaml")))
    assert logged.settings == made.settings
    for key, changed in (
        ("scale", {"scale": "hg+dp+er"}),
        ("scale", {"scale": "hg+dnp+or"}),
        (
            "scale_options.placement_at.*",
            {"scale_options": ScaleOptions(placement_at={"lm_head": "dnp"})},
        ),
        ("backbone.rope_theta", {"backbone": replace(SIZES, rope_theta=100.0)}),
    ):
        with pytest.raises(ConfigError, match=f"^{key} is "):
            load(**changed)


@pytest.mark.parametrize("content", [b"", b"hello: 1", {}, {"state_dict": {}}])
def test_load_from_checkpoint_names_a_file_that_is_no_checkpoint(
    content: Any, tmp_path: Path
) -> None:
    path = tmp_path / "other.ckpt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(ConfigError, match="other.ckpt"):
        PretrainModule.load_from_checkpoint(path)


def test_last_checkpoint_in_a_trainer_without_a_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="LastCheckpoint"):
        trainer(tmp_path, LastCheckpoint()).fit(module(), loader())


def test_module_without_a_trainer_builds_its_backbone(tmp_path: Path) -> None:
    tokens = blocks()[:, :-1]
    assert module().to("meta")(tokens.to("meta")).device.type == "meta"
    assert module().double()(tokens).dtype == torch.float64
    one = module(seed=1)
    two = module(seed=2)
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


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("model.compile True", {"compile": True}),
        ("model.schedule is", {"schedule": "cos"}),
        ("model.optim.lr is", {"lr": "1e-3"}),  # as PyYAML reads it
        ("model.optim.eps is", {"optim": {"eps": None}}),
        ("argument of OptimConfig 'lrr'", {"optim": {"lrr": 1e-3}}),
        ("model.schedule.warmup_ratio is", {"schedule": {"warmup_ratio": "0.1"}}),
        ("model.backbone.d_model is", {"d_model": 32.0}),
        ("model.backbone.router.z_coef is", {"router": {"z_coef": "1e-3"}}),
        ("model.tokens_per_param is", {"tokens_per_param": "20"}),
    ],
)
def test_module_argument_of_a_wrong_type_or_choice_is_refused(
    key: str, change: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=f"^{key}"):
        PretrainModule.from_preset("tiny", **change)


WRONG_BATCHES = [
    [blocks()],
    {"input_ids": blocks()},
    blocks()[0],
    blocks().float(),
    blocks() > 0,
    blocks()[:, :1],
]


@pytest.mark.parametrize(
    ("key", "batch"),
    [
        *(("the batch", batch) for batch in WRONG_BATCHES),
        *(("the range", blocks() + off) for off in (-100, SIZES.vocab_size)),
    ],
)
def test_module_batch_that_is_no_block_of_ids_is_refused(key: str, batch: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{key}"):
        module().training_step(batch, 0)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.int16, torch.int32, torch.uint64])
def test_module_takes_token_ids_of_every_integer_type(dtype: torch.dtype) -> None:
    """TokensLoader of litdata gives the type of the shards, uint16 for ours."""
    made = module()
    made.configure_model()
    losses = [made.training_step(block, 0)["loss"] for block in (blocks(), blocks().to(dtype))]
    assert torch.equal(*losses)


@pytest.mark.parametrize(("precision", "n"), [("32-true", 3), ("bf16-true", 801)])
def test_validation_loss_is_a_mean_over_tokens(precision: Any, n: int, tmp_path: Path) -> None:
    """The last batch is shorter, and its loss differs; sums of half precision would be off."""
    made = module(backbone=replace(SIZES, init_std=1.0))
    sequences = blocks(n)
    batches = DataLoader(sequences, batch_size=2)
    (logged,) = trainer(tmp_path, precision=precision).validate(made, batches, verbose=False)
    with torch.no_grad():
        losses = [made.loss(batch)[0].double() * len(batch) for batch in batches]
    assert logged["val/loss"] == pytest.approx(float(sum(losses)) / n, rel=1e-5)
    by_batch = sum(float(loss) / len(batch) for loss, batch in zip(losses, batches, strict=True))
    assert n > 3 or abs(by_batch / 2 - logged["val/loss"]) > 1e-2


def test_module_without_weights_is_not_exported() -> None:
    tokens = blocks()[:, :-1]
    made = module()
    with pytest.raises(ConfigError, match="configure_model"):
        torch.export.export(made, (tokens,))
    made.configure_model()
    exported = torch.export.export(made, (tokens,)).module()
    torch.testing.assert_close(exported(tokens), made(tokens))


def test_mask_documents_is_that_of_the_logged_loss(data: TokenDataModule, tmp_path: Path) -> None:
    made = module(mask_documents=True, backbone=replace(SIZES, init_std=1.0))
    (logged,) = trainer(tmp_path).test(made, data, verbose=False)
    read = torch.cat(list(data.test_dataloader()))
    documents = document_ids(read[:, :-1], data.settings.manifest.eot)
    logits = made(read[:, :-1], documents)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), read[:, 1:].flatten())
    assert float(loss) == pytest.approx(logged["test/loss"], rel=1e-5)
    with pytest.raises(ConfigError, match="mask_documents"):  # of other data
        trainer(tmp_path).fit(module(mask_documents=True), loader())


def read_a_batch(trainer: Any, *_: Any) -> None:
    """Read a batch of a loader that nobody else reads."""
    next(iter(trainer.datamodule.train_dataloader()))


def adafactor(groups: Any, config: OptimConfig, lr: float) -> torch.optim.Optimizer:
    """Build an optimizer whose states differ in shape from their parameters."""
    return torch.optim.Adafactor(
        [group.options("adafactor", config.weight_decay) for group in groups], lr=lr
    )


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
    keep = ModelCheckpoint(tmp_path, filename="half", every_n_train_steps=4)
    resume = str(tmp_path / "half.ckpt")
    made = {}
    look = LambdaCallback(on_fit_start=read_a_batch, on_train_batch_end=read_a_batch)
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
    again = module(
        optim=OptimConfig(optimizer)
    )  # a new fit does not continue at the position of the resumed one
    trainer(tmp_path / "again", accumulate_grad_batches=2, **changes).fit(again, data)
    assert differences(made["uninterrupted"].state_dict(), again.state_dict()) == []
    run.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    with pytest.raises(ConfigError, match="weights only"):
        run.fit(made["half"], data, ckpt_path=tmp_path / "weights.ckpt", weights_only=True)


def test_trainer_resumed_with_a_different_length_has_its_rates_from_the_first_step(
    tmp_path: Path,
) -> None:
    optim = OptimConfig(lr=0.01, lr_factor_by_role={"input": 2.0})
    path = tmp_path / "a.ckpt"
    seen, note = noted(
        "on_before_optimizer_step", lambda *given: [group["lr"] for group in given[-1].param_groups]
    )
    run = trainer(tmp_path)
    run.fit(module(optim=optim), loader())
    run.save_checkpoint(path)
    again = trainer(tmp_path, note, max_steps=8)
    again.fit(module(optim=optim), loader(), ckpt_path=path, weights_only=True)
    peaks = [group["initial_lr"] for group in again.optimizers[0].param_groups]
    assert 0.02 in peaks
    factors = [ScheduleConfig().factor(step, 8) for step in range(4, 8)]
    assert seen == [[pytest.approx(peak * factor) for peak in peaks] for factor in factors]


def test_trainer_resumed_inside_an_epoch_trains_every_batch_once(
    corpus: Path, tmp_path: Path
) -> None:
    """After an error in a step of the second epoch."""
    seen: dict[str, list[str]] = {"uninterrupted": [], "half": [], "resumed": []}
    for name, path in (
        ("uninterrupted", None),
        ("half", None),
        ("resumed", tmp_path / "half.ckpt"),
    ):

        def note(run: Any, module: Any, outputs: Any, batch: Any, i: int, name: str = name) -> None:
            seen[name].append(str(batch.tolist()))

        def fail(run: Any, module: Any, batch: Any, i: int, name: str = name) -> None:
            if (name, run.current_epoch, i) == ("half", 1, 2):
                raise KeyError("a bug of the user")

        notes = LambdaCallback(on_train_batch_end=note, on_train_batch_start=fail)
        keep = L.pytorch.callbacks.OnExceptionCheckpoint(tmp_path, filename="half")
        limits = EPOCHS | {"limit_train_batches": 4}
        data = TokenDataModule(str(corpus), seq_len=8, batch_size=2, val_sequences=8, seed=0)
        with pytest.raises(KeyError) if name == "half" else nullcontext():
            trainer(tmp_path / name, notes, keep, **limits).fit(
                module(), data, ckpt_path=path, weights_only=True
            )
    assert len(seen["uninterrupted"]) == 8 and seen["resumed"] == seen["uninterrupted"][6:]


CHANGES = [
    (EPOCHS, 12),
    (EPOCHS | {"limit_train_batches": 2}, 4),
    (EPOCHS | {"overfit_batches": 1}, 2),
    ({"fast_dev_run": True}, 1),
    ({"max_steps": -1, "max_time": {"seconds": 1}}, None),
    ({"precision": "bf16-true"}, 4),
    ({"precision": "bf16-mixed"}, 4),
    (EPOCHS | {"callbacks": [EMAWeightAveraging(), LearningRateMonitor()]}, 12),
]


@pytest.mark.parametrize(
    ("changes", "steps"), thinned(CHANGES, [CHANGES[i] for i in (0, 3, 5, 7)], several=True)
)
def test_module_custom_loader_trains_to_the_end(
    changes: dict[str, Any], steps: int | None, tmp_path: Path
) -> None:
    run = trainer(tmp_path, ModelCheckpoint(tmp_path), **changes)
    made = module()
    run.fit(made, loader(), loader())
    assert all(value.isfinite().all() for value in made.state_dict().values())
    assert run.global_step == steps if steps is not None else run.global_step > 1


def test_interrupted_validation_is_not_part_of_the_next(tmp_path: Path) -> None:
    made = module()
    weights = module(seed=1)
    weights.configure_model()
    with pytest.raises(ZeroDivisionError):
        trainer(tmp_path, LambdaCallback(on_validation_batch_end=lambda *_: 1 / 0)).validate(
            made, loader()
        )
    made.load_state_dict(weights.state_dict())
    assert trainer(tmp_path).validate(made, loader()) == trainer(tmp_path).validate(
        weights, loader()
    )


def test_interrupted_step_is_not_part_of_the_next_fit(tmp_path: Path) -> None:
    made = module(backbone=BIASED, seed=6)
    save = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)

    def interrupt(
        trainer: L.Trainer, module: PretrainModule, out: Any, batch: Any, batch_idx: int
    ) -> None:
        assert batch_idx < 9

    one_by_one = DataLoader(blocks(), batch_size=1)
    several = {"accumulate_grad_batches": 4, "limit_val_batches": 0}
    with pytest.raises(AssertionError):
        trainer(tmp_path, save, LambdaCallback(on_train_batch_end=interrupt), **several).fit(
            made, one_by_one
        )
    (checkpoint,) = tmp_path.glob("*step=2.ckpt")
    ends = []
    for resumed in (made, module(backbone=BIASED, seed=6)):
        trainer(tmp_path / "again", max_steps=3, **several).fit(
            resumed, one_by_one, ckpt_path=str(checkpoint)
        )
        ends.append(resumed.state_dict())
    assert differences(*ends) == []


def test_second_fit_of_a_trainer_continues_the_rates(tmp_path: Path) -> None:
    rates, note = noted(
        "on_train_batch_end", lambda trainer, *_: trainer.optimizers[0].param_groups[0]["lr"]
    )
    run = trainer(tmp_path, note, **EPOCHS | {"max_epochs": 1})
    made = module()
    run.fit(made, loader())
    run.fit_loop.max_epochs = 2
    run.fit(made, loader())
    twice = rates[6:]
    rates[:] = []
    trainer(tmp_path, note, **EPOCHS).fit(module(), loader())
    assert twice == rates[6:]


def test_compiled_module_trains_as_the_plain_one(data: TokenDataModule, tmp_path: Path) -> None:
    names = ("plain", "compiled")
    plain = module()
    compiled = module()
    for name, each in zip(names, (plain, torch.compile(compiled, backend="eager")), strict=True):
        trainer(tmp_path / name).fit(each, data)
    losses = [
        [float(row["train/loss"]) for row in rows(tmp_path / name) if row["train/loss"]]
        for name in names
    ]
    assert len(losses[0]) == 4 and losses[1] == pytest.approx(losses[0], rel=1e-5)
    weights = [parameters_to_vector(each.parameters()) for each in (plain, compiled)]
    torch.testing.assert_close(*weights, rtol=0, atol=0.002)  # four steps of 0.01


def test_copy_of_a_compiled_module_has_its_own_weights() -> None:
    with torch.compiler.set_stance("force_eager"):  # the fault is in Python
        made = module(compile="block")
        made.configure_model()
        copy = deepcopy(made)
        copy.loss(blocks())[0].backward()
    assert all(p.grad is not None for p in copy.parameters()) and all(
        p.grad is None for p in made.parameters()
    )


def test_module_initial_weights_of_the_command_line_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="init_from"):
        trainer(tmp_path).fit(module(init_from="last"), loader())


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


@pytest.mark.parametrize("kind", [OwnClipping, Manual])
def test_own_optimization_is_guarded_and_logs_its_rates_and_losses(
    kind: type[PretrainModule], tmp_path: Path
) -> None:
    made = kind(replace(MIXTURE, router=RouterConfig(balance="bias")), lr=0.01)
    run = trainer(tmp_path, TrainingMonitor(1), LearningRateMonitor())
    run.fit(made, loader(), loader())
    assert all(
        value.any() for key, value in made.state_dict().items() if key.endswith("router_bias")
    )
    assert (run.callback_metrics["val/loss"] == 2) == (kind is OwnClipping)
    assert ("val/perplexity" in tags(tmp_path)) == (kind is Manual)
    rates = [[row[tag] for row in rows(tmp_path) if row[tag]] for tag in ("lr", "lr-AdamW/matrix")]
    assert rates[0] == rates[1] and len(rates[0]) == 4
    assert {"train/loss", "grad_norm"} <= tags(tmp_path)
    made.net.embed.weight.data.fill_(float("nan"))
    with pytest.raises(RunError, match="finite"):
        trainer(tmp_path / "nan").fit(made, loader())


class OwnStep(PretrainModule):
    """A subclass with its own training step, which reports no routings, and an optimizer, which
    knows no roles."""

    def training_step(self, block: Tensor, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(
            self(block[:, :-1]).flatten(0, 1), block[:, 1:].flatten()
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def test_module_with_own_step_and_optimizer_trains_and_resumes(
    data: TokenDataModule, tmp_path: Path
) -> None:
    first, resumed = (OwnStep(backbone=MIXTURE, lr=0.01, seed=0) for _ in range(2))
    keep = ModelCheckpoint(tmp_path, filename="half", every_n_train_steps=2, save_top_k=1)
    callbacks = [keep, RouterMonitor(1), TrainingMonitor(1)]
    trainer(tmp_path / "a", *callbacks, gradient_clip_val=1.0, max_steps=2).fit(first, data)
    assert "train/loss" in tags(tmp_path / "a")
    assert any(float(row["grad_norm"] or 0) > 0 for row in rows(tmp_path / "a"))
    trainer(tmp_path / "b", max_steps=4).fit(
        resumed, data, ckpt_path=str(tmp_path / "half.ckpt"), weights_only=True
    )
    assert resumed.trainer.global_step == 4
    first.net.embed.weight.data.fill_(float("nan"))
    with pytest.raises(RunError):
        trainer(tmp_path / "nan").fit(first, data)


class Wider(PretrainModule):
    """A subclass that saves its arguments in the usual way, has a layer of its own and freezes a
    different one."""

    def __init__(self, width: int = 1, **kwargs: Any):
        super().__init__(**kwargs)
        self.save_hyperparameters()
        self.extra = nn.Linear(width, width)

    def configure_model(self) -> None:
        super().configure_model()
        self.net.embed.requires_grad_(False)


def test_own_arguments_are_restored(
    data: TokenDataModule, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = Wider(width=3, backbone=SIZES, lr=0.01)
    keep = ModelCheckpoint(tmp_path)
    trainer(tmp_path / "log", keep).fit(made, data)
    assert "extra.weight is not trained" in caplog.text
    (logged,) = (tmp_path / "log").rglob("hparams.yaml")
    assert "d_model: 16" in logged.read_text()
    restored = Wider.load_from_checkpoint(keep.best_model_path, weights_only=True)
    trainer(tmp_path / "more", max_steps=8).fit(
        restored, data, ckpt_path=keep.best_model_path, weights_only=True
    )
    assert "the learning rate is" in caplog.text  # of a schedule of a different length
    assert torch.equal(restored.net.embed.weight, made.net.embed.weight)
    assert (
        restored.extra.in_features == 3
        and restored.settings.backbone == SIZES
        and restored.lr == 0.01
    )
