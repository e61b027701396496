"""20 steps are 10, a stop, and 10 more, to the last bit of everything a checkpoint holds and a run logs."""

import contextlib
import itertools
import random
import shutil
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch

from lightning_sv.__main__ import main
from lightning_sv.callbacks.training_monitor import write_scalars
from lightning_sv.optim import OPTIMIZERS
from lightning_sv.scale.strategy import PARAMETERIZATIONS, PLACEMENTS
from tests.conftest import thinned
from tests.lit.runs import leaving, load, same_checkpoint, same_curves

STEPS, STOP = 20, 10
TABLES = (PARAMETERIZATIONS, PLACEMENTS, OPTIMIZERS)
#: each row of each table: a new one is tested without an edit
CASES = {
    "-".join(row): ["--model.scale", f"hg+{row[1]}+{row[0]}", "--model.optim.name", row[2]]
    for row in itertools.islice(zip(*map(itertools.cycle, TABLES), strict=False), max(map(len, TABLES)))
}
MIXTURE = ["--model.backbone.n_expert", "6", "--model.backbone.n_expert_active", "2", "--experts.every_n_steps", "4"]
MUON = ["--model.optim.name", "muon"]
CASES |= {
    "moe": ["--model.scale", "unified", *MIXTURE],
    "moe-bias": ["--model.backbone.router.balance", "bias", *MIXTURE, *MUON, "--model.schedule.name", "wsd"],
    "gemma": ["--model.scale", "iwd+offset", "--model.backbone.qk_norm=true", "--model.backbone.post_norm=true", *MUON],
}


class Dice(L.Callback):
    """Sample from every generator in every micro-batch, and log the samples exactly."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: object) -> None:
        values = {"torch": float(torch.rand(())), "numpy": np.random.normal(), "python": random.gauss(0.0, 1.0)}
        write_scalars(trainer, {f"dice/{name}": value for name, value in values.items()})


def fit(args: list[str], run: Path, *more: str) -> None:
    dice = ["--trainer.callbacks", f"{__name__}.Dice", "--checkpoint.every_n_steps", str(STOP)]
    args = [*args, "--trainer.max_steps", str(STEPS), "--model.optim.lr", "6e-3", *dice, *more]
    assert main(["fit", *args, "--run_dir", str(run), "--ckpt_path", "last"]) == 0


@pytest.mark.filterwarnings("ignore:scale strategy")
@pytest.mark.parametrize("name", thinned(CASES, [*list(CASES)[:1], "moe-bias"]))
def test_resume_equals_uninterrupted_bit_for_bit(name: str, short_args: list[str], tmp_path: Path) -> None:
    args = [*short_args, *CASES[name]]
    uninterrupted, resumed = tmp_path / "uninterrupted", tmp_path / "resumed"
    with leaving(resumed, STOP):
        fit(args, uninterrupted)
    assert load(resumed)["global_step"] == STOP
    fit(args, resumed)
    checkpoint = same_checkpoint(uninterrupted, resumed)
    curves = same_curves(uninterrupted, resumed)
    seen = [32 * 32 * step for step in range(1, STEPS + 1)]
    assert curves["train/loss"].tokens.tolist() == seen[3::4]
    for generator in ("torch", "numpy", "python"):
        assert len(set(curves[f"dice/{generator}"].values)) == STEPS + 1  # of a step, and the first micro-batch's
    # several times through the corpus, Python's own modules, which are shorter in some versions
    assert checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["started"] >= 3


@pytest.mark.long
@pytest.mark.parametrize("validations", [1, 2, 10])
def test_resume_around_an_epoch_equals_uninterrupted(validations: int, short_args: list[str], tmp_path: Path) -> None:
    more = ["--data.validations", str(validations), "--checkpoint.every_n_steps", "1", "--trainer.max_steps", "10"]
    with contextlib.ExitStack() as stack:
        for step in (4, 5, 6):
            stack.enter_context(leaving(tmp_path / f"from{step}", step))
        fit(short_args, tmp_path / "whole", *more)
    for step in (4, 5, 6):
        fit(short_args, tmp_path / f"from{step}", *more)
        same_checkpoint(tmp_path / "whole", tmp_path / f"from{step}")
        same_curves(tmp_path / "whole", tmp_path / f"from{step}")


@pytest.mark.long
def test_resume_with_other_workers_or_micro_batches_is_equal(short_args: list[str], tmp_path: Path) -> None:
    """Micro-batches round differently (to 1e-9 in float64) and draw different random numbers."""
    short_args = [*short_args, "--trainer.precision", "64-true"]
    whole = tmp_path / "whole"
    with leaving(tmp_path / "stopped", STOP):
        fit(short_args, whole)
    for name, more in {"workers": ["--data.num_workers", "2"], "micro": ["--data.micro_batch", "8"]}.items():
        run = Path(shutil.copytree(tmp_path / "stopped", tmp_path / name))
        fit(short_args, run, *more)
        if name == "workers":
            same_checkpoint(whole, run)
            same_curves(whole, run)
            continue
        ours, theirs = load(whole), load(run)
        for key, weight in ours["state_dict"].items():
            assert (theirs["state_dict"][key] - weight).norm() <= 1e-9 * weight.norm(), key
