"""The bar of a run on a terminal."""

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from lightning_sv.callbacks import RunProgress


def test_the_bar_moves_while_a_validation_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Console, "is_terminal", True)
    screen = io.StringIO()
    progress = RunProgress()
    progress.stream = screen
    trainer: Any = SimpleNamespace(global_step=3, estimated_stepping_batches=9, num_val_batches=[4], callbacks=[])
    trainer.lightning_module = module = SimpleNamespace(label="llama", step_lr=0.01)
    progress.on_train_start(trainer, module)  # type: ignore[arg-type]
    assert progress._bar is not None
    (task,) = progress._bar.tasks
    progress.on_validation_batch_end(trainer, module, None, None, 1)  # type: ignore[arg-type]
    assert task.fields["text"] == "validating 2/4" and task.completed == 3
    progress.on_validation_end(trainer, module)  # type: ignore[arg-type]
    assert task.fields["text"] == "lr 1.0e-02"
    progress.on_train_end(trainer, module)  # type: ignore[arg-type]
    assert "3/9" in screen.getvalue()
