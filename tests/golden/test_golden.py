"""Losses of 20 steps are what they were, to the last bit; deterministic runs are the same runs."""

from __future__ import annotations

import json
from pathlib import Path

import lightning as L
import pytest
import torch

from lightning_sv.__main__ import main
from tests.golden.record import CASES, FILE, losses, measure


@pytest.mark.slow
def test_losses_are_golden() -> None:
    """In a process of its own, which runs on the plainest kernels: no margin, ==."""
    found = measure()
    golden = json.loads(FILE.read_text())
    if found["key"] not in golden:
        pytest.skip(f"no losses of {found['key']!r}; record them on a commit you trust: python -m tests.golden.record")
    same = set(golden[found["key"]]) == set(CASES)
    assert same, "strategies came or went; on a commit you trust: python -m tests.golden.record"
    differing = [case for case, values in found["losses"].items() if values != golden[found["key"]][case]]
    assert not differing, f"other losses than recorded for {differing}"


@pytest.mark.parametrize("case", ["hg+dnp+or", "gemma, hg+dp+or", "experts, unified", "muon, experts"])
def test_deterministic_algorithms_change_nothing(case: str) -> None:
    plain = losses(case, steps=4)
    torch.use_deterministic_algorithms(True)
    try:
        assert losses(case, steps=4) == plain
    finally:
        torch.use_deterministic_algorithms(False)


class Scattered(L.Callback):
    """Uses an operation that has no deterministic form: put_ without accumulation, where indices repeat."""

    def on_train_batch_start(self, *args: object) -> None:
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))


def test_deterministic_true_fails_loudly(
    run_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run without the operation trains; one with it ends with a sentence that names the operation."""
    arguments = ["fit", *run_args, "--trainer.deterministic", "true", "--trainer.max_steps", "2", "--run_dir"]
    foreign = ["--trainer.callbacks+", "tests.golden.test_golden.Scattered"]
    try:
        assert main([*arguments, str(tmp_path / "ours")]) == 0
        capsys.readouterr()
        assert main([*arguments, str(tmp_path / "foreign"), *foreign]) == 1
    finally:
        torch.use_deterministic_algorithms(False)
    assert "put_ does not have a deterministic implementation" in capsys.readouterr().err
