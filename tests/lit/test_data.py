"""The data module in a plain `lightning.Trainer`."""

import pickle
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint

from lightning_sv import TokenDataModule
from lightning_sv.callbacks import TrainingMonitor
from lightning_sv.corpus import RankShare
from lightning_sv.errors import ConfigError
from tests.callbacks.test_own_module import Foreign, foreign
from tests.lit.own_trainer import EPOCHS, module, noted, trainer

#: Lightning warns about few workers, full folders and missing seeds
pytestmark = pytest.mark.filterwarnings("ignore")


def test_data_module_takes_the_accumulation_of_the_trainer(
    data: TokenDataModule, corpus: Path, tmp_path: Path
) -> None:
    run = trainer(tmp_path, accumulate_grad_batches=3, val_check_interval=6)
    run.fit(module(), data)
    assert (run.accumulate_grad_batches, run.val_check_interval) == (3, 6)
    assert data.settings.global_batch == 6
    wrong = TokenDataModule(corpus, seq_len=8, batch_size=2, global_batch=8)
    with pytest.raises(ConfigError, match="accumulate_grad_batches"):
        run.fit(module(), wrong)


def test_data_module_after_a_fit_pickles_and_is_loaded_from_a_checkpoint(
    data: TokenDataModule, tmp_path: Path
) -> None:
    run = trainer(tmp_path, TrainingMonitor(1))
    run.fit(module(), data)
    tools: Any = run.callbacks  # type: ignore[attr-defined]
    copied, callbacks = pickle.loads(pickle.dumps((data, tools)))
    assert copied.settings == data.settings and len(callbacks) == len(tools)

    path = tmp_path / "fit.ckpt"
    run.save_checkpoint(path)
    loaded = TokenDataModule.load_from_checkpoint(path, weights_only=True)
    assert loaded.settings == data.settings and loaded.train_dataloader().order.seed == 0


class OwnArguments(TokenDataModule):
    """It saves its arguments in the usual way."""

    def __init__(self, corpus: Path, note: str = "", **settings: Any):
        super().__init__(corpus, **settings)
        self.save_hyperparameters()


def test_own_arguments_of_the_data_are_restored(corpus: Path, tmp_path: Path) -> None:
    """The corpus is a Path, and the seeds of module and data differ."""
    data = OwnArguments(corpus, note="mine", seq_len=8, batch_size=2, val_sequences=8, seed=1)
    run = trainer(tmp_path, max_steps=2)
    run.fit(module(seed=0), data)
    run.save_checkpoint(tmp_path / "own.ckpt")
    loaded = OwnArguments.load_from_checkpoint(tmp_path / "own.ckpt", weights_only=True)
    assert loaded.hparams["note"] == "mine" and loaded.settings == data.settings


def test_seed_of_the_data_changes_the_order_alone(corpus: Path) -> None:
    orders = []
    weights = []
    for seed in (0, 1):
        L.seed_everything(3)
        data = TokenDataModule(corpus, seq_len=8, batch_size=2, seed=seed)
        made = module(seed=None)
        made.configure_model()
        orders.append(data.train_dataloader().order.sequences(0, 0))
        weights.append(made.net.embed.weight)
    assert orders[0] != orders[1] and torch.equal(*weights)


@pytest.mark.parametrize(
    ("changes", "distinct"),
    [
        ({"overfit_batches": 2}, 2),
        ({"limit_train_batches": 2, "reload_dataloaders_every_n_epochs": 1}, 6),
    ],
)
def test_data_module_epochs_repeat_batches_only_to_overfit(
    changes: dict[str, Any], distinct: int, data: TokenDataModule, tmp_path: Path
) -> None:
    seen, note = noted("on_train_batch_start", lambda *given: str(given[2].tolist()))
    trainer(tmp_path, note, **EPOCHS | {"max_epochs": 3} | changes).fit(module(), data)
    assert len(seen) == 6 and len(set(seen)) == distinct


def test_data_module_without_a_seed_has_one_order(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    monkeypatch.setattr("lightning_sv.lit.evaluation.VALIDATION_TOKENS", 1)
    data.settings = replace(data.settings, val_sequences=3)
    shares = []
    for rank in range(2):
        data._share = RankShare(2, 1, rank, 2)
        shares.append(list(data.val_dataloader()))
    assert [[len(batch) for batch in batches] for batches in shares] == [[2], [1]]
    assert len(torch.cat([*shares[0], *shares[1]]).unique(dim=0)) == 3


def validations() -> tuple[list[list[int]], L.Callback]:
    """Return a list of the sizes of the batches of each validation, and the callback that fills
    it."""
    sizes: list[list[int]] = []
    return sizes, LambdaCallback(
        on_validation_start=lambda *_: sizes.append([]),
        on_validation_batch_end=lambda *given: sizes[-1].append(len(given[3])),
    )


def test_validations_read_the_same_sequences_by_default(
    data: TokenDataModule, tmp_path: Path
) -> None:
    sizes, note = validations()
    trainer(tmp_path, note, num_sanity_val_steps=0).fit(module(), data)
    assert list(map(sum, sizes)) == [8, 8]


def test_last_validation_reads_the_whole_split(data: TokenDataModule, tmp_path: Path) -> None:
    data.settings = replace(data.settings, full_last_validation=True)
    sizes, note = validations()
    made = module()
    keep = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    run = trainer(tmp_path, note, keep, num_sanity_val_steps=0)
    run.fit(made, data)
    every = data.settings.manifest.val.sequences(8)
    assert list(map(sum, sizes)) == [8, every] and every > 1000
    with torch.no_grad():
        loss = made.loss(data.settings.held_out(every))[0].item()
    expected = pytest.approx(loss, abs=1e-6)
    of_fit = float(run.callback_metrics["val/loss"])
    assert of_fit == expected
    assert run.validate(made, data, verbose=False)[0]["val/loss"] == expected
    assert run.test(made, data, verbose=False)[0]["test/loss"] == expected
    sizes.clear()
    resumed = trainer(tmp_path, note, num_sanity_val_steps=0)
    resumed.fit(module(), data, ckpt_path=tmp_path / "step=2.ckpt")
    assert list(map(sum, sizes)) == [every]
    assert float(resumed.callback_metrics["val/loss"]) == of_fit


@pytest.mark.parametrize(
    ("changes", "batches"),
    [
        ({"limit_val_batches": 2}, [1, 2]),
        ({"limit_val_batches": 0.5}, [2, 10]),
        ({"max_steps": -1, "max_epochs": 2, "limit_train_batches": 2}, [4, 20]),
        ({"max_steps": 5}, [4, 4]),  # no validation at the last step
        ({"num_sanity_val_steps": 2}, [2, 4, 20]),
        (EPOCHS | {"overfit_batches": 3, "val_check_interval": 1.0}, [3, 3]),
    ],
)
def test_last_validation_follows_the_settings_of_the_trainer(
    data: TokenDataModule, tmp_path: Path, changes: dict[str, Any], batches: list[int]
) -> None:
    sequences = 8 if changes.get("limit_val_batches") == 2 else 1024
    data.settings = replace(data.settings, val_sequences=sequences, full_last_validation=True)
    sizes, note = validations()
    trainer(tmp_path, note, **{"num_sanity_val_steps": 0, **changes}).fit(module(), data)
    assert list(map(len, sizes)) == batches


@pytest.mark.parametrize(
    ("key", "wrong"),
    [("global_batch", 0), ("seq_len", 100_000), ("seed", 2**32), ("batch_size", "4")],
)
def test_data_module_wrong_number_is_refused(
    key: str, wrong: Any, corpus: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=key):
        data = TokenDataModule(**{"corpus": corpus, "seq_len": 8, "batch_size": 2, key: wrong})
        trainer(tmp_path).fit(Foreign(foreign("applied")), data)


@pytest.mark.parametrize("batches", [3, 4])
def test_position_inside_a_step_is_refused_for_an_own_module(
    batches: int, data: TokenDataModule, tmp_path: Path
) -> None:
    """It has no `ExactResume`, which makes Lightning begin the step again."""

    def fit(*callbacks: L.Callback, resume: Path | None = None) -> None:
        run = trainer(tmp_path / "log", *callbacks, accumulate_grad_batches=2, limit_val_batches=0)
        run.fit(Foreign(foreign("applied")), data, ckpt_path=resume, weights_only=True)

    def stop(run: L.Trainer, *_: Any) -> None:
        run.should_stop = run.fit_loop.epoch_loop.total_batch_idx + 1 == batches

    fit(LambdaCallback(on_train_batch_end=stop), ModelCheckpoint(tmp_path, save_last=True))
    is_refused = pytest.raises(ConfigError, match="inside an optimizer step")
    with is_refused if batches == 3 else nullcontext():
        fit(resume=tmp_path / "last.ckpt")
