"""Damaged checkpoints are refused with one sentence when a run resumes from them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sv.__main__ import main
from tests.conftest import Refused, thinned, write_run_args

OneStep = Callable[[Path], tuple[list[str], Path]]


@pytest.fixture(scope="module")
def one_step(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> OneStep:
    """Copy a run of one step into a folder; return the words of its second step and its checkpoint."""
    trained = tmp_path_factory.mktemp("one_step")
    fit = ["fit", *write_run_args(corpus, trained), "--trainer.max_steps"]
    assert main([*fit, "1", "--run_dir", str(trained / "run")]) == 0

    def copied(folder: Path) -> tuple[list[str], Path]:
        run = shutil.copytree(trained / "run", folder / "run")
        return [*fit, "2", "--allow_lr_jump", "--run_dir", str(run)], run / "checkpoints/last.ckpt"

    return copied


def damage(checkpoint: dict[str, Any], how: str) -> None:
    """Replace an entry, or damage the state of the optimizer."""
    (state,) = checkpoint["optimizer_states"]
    group = state["param_groups"][0]
    match how:
        case "number":
            group["params"][1] = group["params"][0]
        case "shape":
            state["state"][1]["exp_avg"] = torch.zeros(1)
        case "incomplete":
            del state["state"][1]["exp_avg"]
        case "rate":
            del group["lr"]
        case key:
            checkpoint[key] = 7


KINDS = ["optimizer_states", "lr_schedulers", "loops", "callbacks", "number", "shape", "incomplete", "rate"]


@pytest.mark.parametrize("how", thinned(KINDS, ["optimizer_states", "loops", "shape", "rate"]))
def test_fit_damaged_checkpoint_is_refused(how: str, one_step: OneStep, tmp_path: Path, refused: Refused) -> None:
    fit, path = one_step(tmp_path)
    checkpoint = torch.load(path, weights_only=True)
    damage(checkpoint, how)
    torch.save(checkpoint, path)
    error = refused(*fit, "--ckpt_path", str(path))
    assert "error: the checkpoint" in error and ("optimizer state is damaged" in error or how in KINDS[:4])
