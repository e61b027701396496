"""Public names, examples and presets, and LightningCLI."""

import re
import runpy
from pathlib import Path

import pytest
from lightning.pytorch.cli import LightningCLI

import lightning_sv
from lightning_sv import PretrainModule, TokenDataModule
from lightning_sv.errors import ConfigError
from tests.conftest import argv
from tests.lit.own_trainer import (
    EXAMPLES,
    OWN_MODULE,
    column,
    tags,
)

#: Lightning warns about few workers, full folders and missing seeds
pytestmark = pytest.mark.filterwarnings("ignore")


def test_package_every_public_name_is_listed_and_imports() -> None:
    assert set(lightning_sv.__all__) <= set(dir(lightning_sv))
    for name in lightning_sv.__all__:
        assert getattr(lightning_sv, name) is not None


def test_lightning_trainer_example_reads_its_best_checkpoint(
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    example = runpy.run_path(str(EXAMPLES / "lightning_trainer.py"))
    example["main"](str(corpus), str(tmp_path / "out"), steps=50)
    assert re.search(r"logits \(\d+, 64, 1024\)", capsys.readouterr().out)
    wanted = {
        "train/loss",
        "val/loss",
        "val/perplexity",
        "branch_norm/layer0/q_proj/effective",
        "sharpness/loss",
    }
    assert wanted <= tags(tmp_path / "out")


def test_own_lightning_module_example_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(OWN_MODULE))["main"](str(tmp_path), steps=40)
    losses = column(tmp_path, "loss")
    assert losses[-1] < losses[0] - 0.5
    assert "branch_norm/head/up_proj/gamma_out" in tags(tmp_path)


def test_lightning_cli_trains(corpus: Path, tmp_path: Path) -> None:
    words = argv(
        "fit --model.backbone.d_model=16 --model.backbone.n_layer=1 --model.backbone.n_head=2"
        f" --model.backbone.vocab_size=300 --model.lr=0.01 --data.corpus={corpus} --data.seq_len=8"
        " --data.batch_size=2 --data.val_sequences=4 --trainer.max_steps=2 --trainer.devices=1"
        f" --trainer.default_root_dir={tmp_path} --trainer.enable_progress_bar=false"
        " --trainer.accelerator=cpu"
    )
    done = LightningCLI(
        PretrainModule, TokenDataModule, args=words, auto_configure_optimizers=False
    )
    assert done.trainer.global_step == 2 and "train/loss" in done.trainer.callback_metrics


def test_from_preset_conf_of_a_different_project_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    made = PretrainModule.from_preset("tiny", scale="llama", name="mine", d_model=32, lr=0.5)
    config = made.settings.backbone
    assert (config.name, config.d_model, config.n_layer, made.lr) == ("mine", 32, 2, 0.5)
    assert str(made.settings.strategy) == "llama"
    with pytest.raises(ConfigError, match="mean 'tiny'"):
        PretrainModule.from_preset("tinny")
    with pytest.raises(ConfigError, match="width"):
        PretrainModule.from_preset("tiny", width=3)
