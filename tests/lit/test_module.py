"""The module in a plain `lightning.Trainer`."""

from contextlib import suppress
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
    OnExceptionCheckpoint,
)
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader

from lightning_sv import PretrainModule, TokenDataModule, apply_strategy
from lightning_sv.callbacks import RouterMonitor, TrainingMonitor
from lightning_sv.errors import ConfigError
from lightning_sv.nn import document_ids
from lightning_sv.optim import OptimConfig, ScheduleConfig
from lightning_sv.scale import ScaleOptions
from tests.conftest import thinned
from tests.lit.own_trainer import (
    BIASED,
    EPOCHS,
    MIXTURE,
    SIZES,
    blocks,
    column,
    loader,
    module,
    noted,
    small_data,
    tags,
    trainer,
)
from tests.lit.runs import differences

#: Lightning warns about few workers, full folders and missing seeds
pytestmark = pytest.mark.filterwarnings("ignore")


def test_module_checkpoint_of_a_trainer_restores_it(data: TokenDataModule, tmp_path: Path) -> None:
    made = module()
    quiet = trainer(tmp_path, logger=False)
    for evaluate in (quiet.validate, quiet.test):  # an evaluated module trains afterwards
        (values,) = evaluate(made, data, verbose=False)
        assert len(values) == 2  # loss and perplexity
    keep = ModelCheckpoint(tmp_path, monitor="val/loss")
    rates = LearningRateMonitor()
    run = trainer(tmp_path / "log", keep, L.pytorch.callbacks.EarlyStopping("val/loss"), rates)
    run.fit(made, data)
    assert {"train/loss", "val/loss", "val/perplexity"} <= run.logged_metrics.keys()
    assert {"lr-AdamW/input", "lr-AdamW/matrix"} <= rates.lrs.keys()
    last = run.callback_metrics["val/loss"]
    assert last == run.validate(made, data, verbose=False)[0]["val/loss"]
    assert last == run.test(made, data, verbose=False)[0]["test/loss"]
    restored = PretrainModule.load_from_checkpoint(keep.best_model_path, weights_only=True)
    assert restored.settings.strategy == made.settings.strategy and restored.lr == 0.01
    made.load_state_dict(torch.load(keep.best_model_path, weights_only=True)["state_dict"])
    tokens = blocks()[:, :-1]
    assert torch.equal(restored(tokens), made(tokens)) and restored(tokens).shape == (12, 8, 300)


def test_load_from_checkpoint_arguments_keep_the_function(tmp_path: Path) -> None:
    made = module()
    path = tmp_path / "a.ckpt"
    run = trainer(tmp_path, max_steps=1)
    run.fit(made, loader())
    run.save_checkpoint(path)
    load: Any = partial(PretrainModule.load_from_checkpoint, path, weights_only=True)
    training = {
        "optim": OptimConfig("muon", lr=0.1),
        "schedule": ScheduleConfig("wsd"),
        "compile": "block",
        "seed": 3,
    }
    initial = {
        "backbone": replace(SIZES, name="mine", init_std_by_role={"head": 0.01}),
        "scale": "hg+dp+or+nowd",
        "scale_options": ScaleOptions(initial_gamma_out=2.0),
        "lr": 0.1,
    }
    for changes in (training, initial):
        restored = load(**changes)
        assert differences(restored.state_dict(), made.state_dict()) == []
    assert restored.lr == 0.1
    logged = load(hparams_file=next(tmp_path.rglob("hparams.yaml")))
    assert logged.settings == made.settings
    other_head = ScaleOptions(placement_at={"lm_head": "dnp"})
    for key, changed in (
        ("scale", {"scale": "hg+dp+er"}),
        ("scale", {"scale": "hg+dnp+or"}),
        ("scale_options.placement_at.*", {"scale_options": other_head}),
        ("backbone.rope_theta", {"backbone": replace(SIZES, rope_theta=100.0)}),
    ):
        with pytest.raises(ConfigError, match=f"^{key} is "):
            load(**changed)
    with pytest.raises(ConfigError, match="'weight_decay' is unknown"):  # Lightning ignores it
        load(weight_decay=0.0, map_location="cpu")


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


def test_module_warns_once_of_a_strategy_that_is_a_simpler_one() -> None:
    with pytest.warns(UserWarning, match="'ap'") as warned:
        module(scale="hg+ap").configure_model()
    assert len(warned) == 1


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("model.compile True", {"compile": True}),
        ("model.schedule is", {"schedule": "cos"}),
        ("model.optim.lr is", {"lr": "1e-3"}),  # as PyYAML reads it
        ("model.optim.eps is", {"optim": {"eps": None}}),
        ("argument of OptimConfig 'lrr'", {"optim": {"lrr": 1e-3}}),
        ("argument of RouterConfig 'balanse'", {"router": {"balanse": "loss"}}),
        ("argument of RopeScalingConfig 'type'", {"rope_scaling": {"type": "llama3"}}),
        ("model.schedule.warmup_ratio is", {"schedule": {"warmup_ratio": "0.1"}}),
        ("model.backbone.d_model is", {"d_model": 32.0}),
        ("model.backbone.router.z_coef is", {"router": {"z_coef": "1e-3"}}),
        ("model.tokens_per_param is", {"tokens_per_param": "20"}),
        ("model.optim.lr is", {"lr": float("inf")}),
        ("model.optim.lr_factor_by_role.head is", {"optim": {"lr_factor_by_role": {"head": "2"}}}),
        ("model.optim.undecayed is", {"optim": {"undecayed": "embedding"}}),
        ("model.backbone.init_std_by_role is", {"init_std_by_role": [0.1]}),
        ("model.backbone.qk_norm is", {"qk_norm": "false"}),  # which Python takes for true
        ("scale_options.initial_gamma_out is", {"scale_options": {"initial_gamma_out": "0.5"}}),
        ("scale_options.placement_at.lm_head", {"scale_options": {"placement_at": {"lm_head": 1}}}),
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
    batches = DataLoader(blocks(n), batch_size=2)
    (logged,) = trainer(tmp_path, precision=precision).validate(made, batches, verbose=False)
    with torch.no_grad():
        losses = torch.stack([made.loss(batch)[0].double() for batch in batches])
    sizes = torch.tensor([len(batch) for batch in batches])
    assert logged["val/loss"] == pytest.approx(float((losses * sizes).sum() / n), rel=1e-5)
    assert n > 3 or abs(losses.mean() - logged["val/loss"]) > 1e-2


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
    def fit(data: TokenDataModule, *callbacks: L.Callback, resume: Path | None = None) -> Any:
        made = module(optim=OptimConfig(optimizer))
        run = trainer(tmp_path / "log", *callbacks, accumulate_grad_batches=2, **changes)
        run.fit(made, data, ckpt_path=resume, weights_only=True)
        return made

    uninterrupted = fit(small_data(corpus)).state_dict()
    look = LambdaCallback(on_fit_start=read_a_batch, on_train_batch_end=read_a_batch)
    keep = ModelCheckpoint(tmp_path, filename="half", every_n_train_steps=4)
    half = fit(small_data(corpus), look, keep)
    data = small_data(corpus)
    resumed = fit(data, look, resume=tmp_path / "half.ckpt")
    run = resumed.trainer
    position = data.state_dict()
    run.validate(resumed, data, verbose=False)
    assert position["epoch"] == ("max_epochs" in changes) * 2 and data.state_dict() == position
    assert differences(uninterrupted, resumed.state_dict()) == []
    # a new fit does not continue at the position of the resumed one
    assert differences(uninterrupted, fit(data).state_dict()) == []
    run.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    with pytest.raises(ConfigError, match="weights only"):
        run.fit(half, data, ckpt_path=tmp_path / "weights.ckpt", weights_only=True)


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


@pytest.mark.parametrize(
    ("accumulate", "val_check_interval", "error"),
    [(1, 1.0, False), (2, 1.0, False), (2, 3, False), (1, 1.0, True)],
)
def test_trainer_resumed_after_a_stop_inside_an_epoch_equals_uninterrupted(
    accumulate: int, val_check_interval: float, error: bool, corpus: Path, tmp_path: Path
) -> None:
    """As by max_time, which may come inside a step; a validation may too. Or after an error."""
    changes = {
        "accumulate_grad_batches": accumulate,
        "val_check_interval": val_check_interval,
        "limit_train_batches": 6,
    }

    def fit(*callbacks: L.Callback, resume: Path | None = None) -> Any:
        made = module()
        run = trainer(tmp_path / "log", *callbacks, **EPOCHS | changes)
        with suppress(KeyError):
            run.fit(made, small_data(corpus), ckpt_path=resume, weights_only=True)
        return made.state_dict()

    def stop(run: L.Trainer, module: Any, out: Any, batch: Any, batch_idx: int) -> None:
        run.should_stop = (run.current_epoch, batch_idx) == (1, 2)

    def fail(run: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if (run.current_epoch, batch_idx) == (1, 3):
            raise KeyError("a bug of the user")

    uninterrupted = fit()
    first = tmp_path / "first"
    steps = 6 // accumulate  # of an epoch
    fit(ModelCheckpoint(first, "{step}", every_n_train_steps=steps, save_top_k=-1))
    # after a checkpoint of an epoch's last batch Lightning counts no new epoch
    for resume in (None, first / f"step={steps}.ckpt"):
        kept = tmp_path / f"kept-{resume is None}"
        ends: list[L.Callback] = [
            LambdaCallback(on_train_batch_end=stop),
            ModelCheckpoint(kept, save_last=True),
        ]
        if error:
            ends = [
                LambdaCallback(on_train_batch_start=fail),
                OnExceptionCheckpoint(kept, filename="last"),
            ]
        stopped = fit(*ends, resume=resume)
        assert differences(uninterrupted, stopped)
        assert differences(uninterrupted, fit(resume=kept / "last.ckpt")) == []


ENDS = [
    ({"max_steps": -1, "max_time": {"seconds": 1}}, None),
    (EPOCHS | {"callbacks": [EMAWeightAveraging(), LearningRateMonitor()]}, 12),
]


@pytest.mark.parametrize(("changes", "steps"), thinned(ENDS, ENDS[1:], several=True))
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
    fail = LambdaCallback(on_validation_batch_end=lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer(tmp_path, fail).validate(made, loader())
    made.load_state_dict(weights.state_dict())
    losses = [trainer(tmp_path).validate(each, loader()) for each in (made, weights)]
    assert losses[0] == losses[1]


def test_interrupted_step_is_not_part_of_the_next_fit(tmp_path: Path) -> None:
    made = module(backbone=BIASED, seed=6)
    save = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)

    def interrupt(run: Any, module: Any, out: Any, batch: Any, batch_idx: int) -> None:
        assert batch_idx < 9

    one_by_one = DataLoader(blocks(), batch_size=1)
    several = {"accumulate_grad_batches": 4, "limit_val_batches": 0}
    run = trainer(tmp_path, save, LambdaCallback(on_train_batch_end=interrupt), **several)
    with pytest.raises(AssertionError):
        run.fit(made, one_by_one)
    ends = []
    for resumed in (made, module(backbone=BIASED, seed=6)):
        again = trainer(tmp_path / "again", max_steps=3, **several)
        again.fit(resumed, one_by_one, ckpt_path=tmp_path / "step=2.ckpt")
        ends.append(resumed.state_dict())
    assert differences(*ends) == []


def test_second_fit_of_a_trainer_continues_the_rates(tmp_path: Path) -> None:
    def rate(run: L.Trainer, *_: Any) -> float:
        return float(run.optimizers[0].param_groups[0]["lr"])

    rates, note = noted("on_train_batch_end", rate)
    run = trainer(tmp_path, note, **EPOCHS | {"max_epochs": 1})
    made = module()
    run.fit(made, loader())
    run.fit_loop.max_epochs = 2
    run.fit(made, loader())
    expected, note = noted("on_train_batch_end", rate)
    trainer(tmp_path, note, **EPOCHS).fit(module(), loader())
    assert rates[6:] == expected[6:]


def test_compiled_module_trains_as_the_plain_one(data: TokenDataModule, tmp_path: Path) -> None:
    plain = module()
    trainer(tmp_path / "plain").fit(plain, data)
    compiled = module()
    trainer(tmp_path / "compiled").fit(torch.compile(compiled, backend="eager"), data)
    losses = column(tmp_path / "plain", "train/loss")
    assert len(losses) == 4
    assert column(tmp_path / "compiled", "train/loss") == pytest.approx(losses, rel=1e-5)
    weights = [parameters_to_vector(each.parameters()) for each in (plain, compiled)]
    torch.testing.assert_close(*weights, rtol=0, atol=0.002)  # four steps of 0.01


def test_copy_of_a_compiled_module_has_its_own_weights() -> None:
    with torch.compiler.set_stance("force_eager"):  # the fault is in Python
        made = module(compile="block")
        made.configure_model()
        copy = deepcopy(made)
        copy.loss(blocks())[0].backward()
    assert all(p.grad is not None for p in copy.parameters())
    assert all(p.grad is None for p in made.parameters())


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
    keep = ModelCheckpoint(tmp_path, filename="half", every_n_train_steps=2)
    callbacks = [keep, RouterMonitor(1), TrainingMonitor(1)]
    trainer(tmp_path / "a", *callbacks, gradient_clip_val=1.0, max_steps=2).fit(first, data)
    assert "train/loss" in tags(tmp_path / "a")
    assert any(column(tmp_path / "a", "grad_norm"))
    more = trainer(tmp_path / "b", max_steps=4)
    more.fit(resumed, data, ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert more.global_step == 4


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
    best = keep.best_model_path
    restored = Wider.load_from_checkpoint(best, weights_only=True)
    more = trainer(tmp_path / "more", max_steps=8)
    more.fit(restored, data, ckpt_path=best, weights_only=True)
    assert "the learning rate is" in caplog.text  # of a schedule of a different length
    assert torch.equal(restored.net.embed.weight, made.net.embed.weight)
    assert restored.extra.in_features == 3
    assert restored.settings.backbone == SIZES and restored.lr == 0.01
