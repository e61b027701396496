"""Text that is drawn while a model is trained: what `generate` would draw, and nothing of the run is changed by it."""

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_sv.__main__ import main
from tests.lit.runs import same_checkpoint, same_curves


def test_samples_equal_generate_and_leave_the_run_unchanged(
    run_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    silent, speaking = tmp_path / "silent", tmp_path / "speaking"
    args = ["fit", *run_args, "--trainer.max_steps", "4", "--model.nonfinite", "skip"]
    assert main([*args, "--run_dir", str(silent)]) == 0
    drawn = ["--samples.tokens", "20", "--samples.prompt", "def f\n# x", "--samples.temperature", "1.5"]
    assert main([*args, *drawn, "--run_dir", str(speaking)]) == 0
    same_checkpoint(silent, speaking)
    same_curves(silent, speaking)

    capsys.readouterr()
    words = ["--tokens", "20", "--prompt", "def f\n# x", "--temperature", "1.5", "--json"]
    assert main(["generate", str(speaking / "checkpoints/last.ckpt"), *words]) == 0
    text = "def f\n# x" + json.loads(capsys.readouterr().out)["text"]
    events = EventAccumulator(str(speaking))
    events.Reload()
    first, last = events.Tensors("sample/text_summary")
    assert (first.step, last.step) == (2 * 128, 4 * 128)
    (shown,) = last.tensor_proto.string_val
    assert shown.decode() == "".join(f"    {line}\n" for line in text.split("\n"))
    assert "sample/text_summary" not in EventAccumulator(str(silent)).Reload().Tags()["tensors"]
