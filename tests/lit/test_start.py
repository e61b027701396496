"""Runs that start from the weights of a different run: inherited state, records, refused inputs."""

import os
import shutil
from pathlib import Path

import lightning as L
import pytest
import torch

from lightning_sv.__main__ import main
from lightning_sv.errors import ConfigError
from lightning_sv.lit.checkpoint.compat import check_settings, recorded_settings
from lightning_sv.nn import BackboneConfig
from lightning_sv.optim import OptimConfig
from lightning_sv.runs.checkpoint import CHECKPOINT_KEY
from lightning_sv.runs.directory import CONFIG, LAST, read_summary
from lightning_sv.runs.events import read_run
from lightning_sv.runs.provenance import commit
from lightning_sv.settings.model import PretrainConfig
from tests.conftest import Refused, Told, argv, write_run_args
from tests.lit.runs import (
    contents,
    differences,
    leaving,
    load,
    run_fit,
    same_checkpoint,
    same_curves,
)

#: changes that are allowed for a run that starts from other weights
OTHER = argv(
    "--model.scale hg+dnp+or+nowd --model.backbone.name mine --model.backbone.init_std 0.5"
    " --model.optim.name muon --model.optim.lr 1e-3 --model.schedule.name wsd --data.seed 7"
    " --data.seq_len 16 --model.mask_documents true --trainer.max_steps 6"
    " --checkpoint.every_n_steps 3"
)
#: experts whose choice depends on biases, which are no parameters
EXPERTS = argv(
    "--model.backbone.n_expert 4 --model.backbone.n_expert_active 2"
    " --model.backbone.router.balance bias"
)


class First(L.Callback):
    """Keeps the weights and the optimizer's states as they are before the first step."""

    weights: dict[str, torch.Tensor]
    states: int

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        First.weights = {key: value.clone() for key, value in pl_module.state_dict().items()}
        First.states = len(trainer.optimizers[0].state)


@pytest.fixture
def run_args(run_args: list[str]) -> list[str]:
    return [*run_args, *EXPERTS]


@pytest.fixture(scope="module")
def source(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that no test writes to."""
    folder = tmp_path_factory.mktemp("source")
    assert run_fit([*write_run_args(corpus, folder), *EXPERTS], folder / "run") == 0
    return folder / "run"


def test_init_from_records_its_origin_and_resumes_without_it(
    source: Path, run_args: list[str], tmp_path: Path, told: Told, refused: Refused
) -> None:
    source = shutil.copytree(source, tmp_path / "source")
    there = load(source)
    complete = tmp_path / "complete"
    resumed = tmp_path / "resumed"
    fit = ["fit", *run_args, *OTHER]
    first = f"--model.init_from {source} --trainer.callbacks {__name__}.First --run_dir {complete}"
    with leaving(resumed, 3):
        said = " ".join(told(*fit, *argv(first)).split())
    assert f"starts from the weights of {source / LAST}, hg+dnp+or+iwd after step 12" in said
    assert differences(First.weights, dict(there["state_dict"])) == [] and First.states == 0
    assert First.weights["backbone.layers.0.ffn.router_bias"].any()
    run = read_run(complete)
    summary = run.summary
    assert (summary["steps"], run.config["model"]["init_from"]) == (6, str(source))
    assert summary["origin"] == {
        "checkpoint": str(source / LAST),
        "label": "hg+dnp+or+iwd",
        "commit": commit(),
        "step": 12,
        "tokens": 12 * 128,
        "corpus_hash": read_summary(source)["corpus_hash"],
        "origin": None,
    }
    # learned, because it continues from the end of the source
    assert run.curve("train/loss").values[0] < read_run(source).curve("train/loss").values[0] - 0.2

    branch = tmp_path / "branch"
    words = argv(f"--model.init_from {complete / LAST} --trainer.max_steps 1")
    assert run_fit([*fit[1:], *words], branch) == 0
    expected = {"step": 6, "tokens": 6 * 64, "origin": summary["origin"]}
    assert expected.items() <= read_summary(branch)["origin"].items()

    shutil.rmtree(source)
    assert main(argv(f"fit --config {resumed / CONFIG} --ckpt_path {resumed / LAST}")) == 0
    same_checkpoint(complete, resumed)
    same_curves(complete, resumed)
    assert read_summary(resumed)["origin"] == summary["origin"]

    before = contents(complete)
    error = refused(*fit, "--ckpt_path", str(complete / LAST))
    assert f"init_from is None; expected {source}, as in the checkpoint" in error
    assert contents(complete) == before


def test_recorded_init_from_is_absolute(tmp_path: Path) -> None:
    sizes = BackboneConfig(d_model=32, n_layer=1, n_head=2, vocab_size=300)
    config = PretrainConfig(sizes, optim=OptimConfig(lr=0.1), init_from=os.path.relpath(tmp_path))
    assert recorded_settings(config, None)["init_from"] == str(tmp_path)


def test_init_from_with_a_different_model_is_refused(
    source: Path, run_args: list[str], tmp_path: Path, refused: Refused
) -> None:
    """Other keys are those of `load_from_checkpoint`, in test_module.py."""
    here = tmp_path / "refused"
    words = argv(f"--model.init_from {source} --run_dir {here} --model.optim.lr 1e-3")
    error = refused("fit", *run_args, *words, "--model.scale", "hg+dnp+er")  # of the same shapes
    assert "model.scale is hg+dnp+er; expected hg+dnp+or, as in " in error
    assert error.count("\n") == 1 and not here.exists()


def test_init_from_unfit_checkpoint_refused(
    source: Path, short_corpus: Path, tmp_path: Path, refused: Refused
) -> None:
    fit = ["fit", *write_run_args(short_corpus, tmp_path), *EXPERTS, "--model.init_from"]
    assert "tokenizer_sha256 is " in refused(*fit, str(source))  # a bpe:300 of its own text
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "config.json").write_text("{}")
    assert "Use apply_strategy" in refused(*fit, str(theirs))
    checkpoint = torch.load(source / LAST, weights_only=True)
    checkpoint[CHECKPOINT_KEY]["data"] = {}
    bad = tmp_path / "bad.ckpt"
    torch.save(checkpoint, bad)
    fit = argv(f"fit --config {source / CONFIG} --run_dir {tmp_path / 'new'}")
    assert "does not record its step" in refused(*fit, "--model.init_from", str(bad))


def test_checkpoint_without_a_newer_setting_has_its_default() -> None:
    sizes = BackboneConfig(d_model=32, n_layer=1, n_head=2, vocab_size=64)
    config = PretrainConfig(sizes, optim=OptimConfig(lr=1e-3))
    saved = recorded_settings(config, None)
    for key, name in (
        ("backbone", "n_kv_head"),
        ("scale_options", "initial_gamma_out"),
        ("optim", "clip_by_role"),
    ):
        del saved[key][name]
    checkpoint = {CHECKPOINT_KEY: saved, "optimizer_states": []}
    check_settings(checkpoint, config, None, training=True)
    saved["backbone"]["n_wing"] = 2
    with pytest.raises(ConfigError, match="n_wing"):
        check_settings(checkpoint, config, None, training=True)
