"""A run resumed from somebody else's checkpoint: trains on, or says in one line why not.

The optimizer's state is left as it is: callbacks and schedulers read a learning rate in its groups, and one without
it ends a resumed run in a traceback.
"""

from __future__ import annotations

import contextlib
import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given

from lightning_sv.__main__ import main
from tests.conftest import Refused, write_run_args
from tests.faults.conftest import Tally
from tests.faults.fuzz import attempt, budget, edited
from tests.faults.test_fuzz_inputs import VALUES


def fuzz_resume(tally: Tally, run_args: list[str], folder: Path, n: int) -> None:
    fit = ["fit", *run_args, "--trainer.max_steps"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert main([*fit, "2", "--run_dir", str(folder / "run")]) == 0
    good = torch.load(folder / "run/checkpoints/last.ckpt", weights_only=True)
    (whole,) = good["optimizer_states"]
    path = folder / "hostile.ckpt"

    def resume() -> None:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([*fit, "3", "--extend", "--run_dir", str(folder / "resumed"), "--ckpt_path", str(path)])
        if code == 2:
            raise ValueError(err.getvalue())
        assert code == 0, err.getvalue()

    @budget(n)
    @given(edited(good | {"optimizer_states": [{"param_groups": whole["param_groups"]}]}, VALUES))
    def run(value: Any) -> None:
        with contextlib.suppress(LookupError, TypeError, AttributeError):  # of what is no longer there
            value["optimizer_states"][0]["state"] = whole["state"]
        torch.save(value, path)
        attempt(tally, "hostile checkpoint resumed", resume)

    run()


@pytest.mark.faults
def test_hostile_checkpoint_resumes_or_is_refused(tally: Tally, run_args: list[str], tmp_path: Path) -> None:
    fuzz_resume(tally, run_args, tmp_path, 100)


OneStep = Callable[[Path], tuple[list[str], Path]]


@pytest.fixture(scope="module")
def one_step(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> OneStep:
    """Copy a run of one step into a folder; return the words of its second step and its checkpoint."""
    trained = tmp_path_factory.mktemp("one_step")
    fit = ["fit", *write_run_args(corpus, trained), "--trainer.max_steps"]
    assert main([*fit, "1", "--run_dir", str(trained / "run")]) == 0

    def copied(folder: Path) -> tuple[list[str], Path]:
        run = shutil.copytree(trained / "run", folder / "run")
        return [*fit, "2", "--extend", "--run_dir", str(run)], run / "checkpoints/last.ckpt"

    return copied


@pytest.mark.parametrize("key", ["optimizer_states", "lr_schedulers", "loops", "callbacks"])
def test_resume_from_damaged_checkpoint_is_refused(
    key: str, one_step: OneStep, tmp_path: Path, refused: Refused
) -> None:
    fit, path = one_step(tmp_path)
    checkpoint = torch.load(path, weights_only=True)
    torch.save(checkpoint | {key: 7}, path)
    assert "error: the checkpoint" in refused(*fit, "--ckpt_path", str(path))


@pytest.mark.parametrize("how", ["number", "shape", "incomplete", "rate"])
def test_resume_from_damaged_optimizer_state_is_refused(
    how: str, one_step: OneStep, tmp_path: Path, refused: Refused
) -> None:
    fit, path = one_step(tmp_path)
    checkpoint = torch.load(path, weights_only=True)
    (state,) = checkpoint["optimizer_states"]
    group = state["param_groups"][0]
    if how == "number":
        group["params"][1] = group["params"][0]
    elif how == "shape":
        state["state"][1]["exp_avg"] = torch.zeros(1)
    elif how == "incomplete":
        del state["state"][1]["exp_avg"]
    else:
        del group["lr"]
    torch.save(checkpoint, path)
    assert "error: the checkpoint's optimizer state is damaged" in refused(*fit, "--ckpt_path", str(path))
