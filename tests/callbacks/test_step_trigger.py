"""The steps at which callbacks act."""

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_sv.callbacks import BranchNorms, Preconditioner, RouterMonitor, TrainingMonitor
from lightning_sv.callbacks.run_state import StepTrigger


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("begin", [0, 4])  # a resumed run does not act again at the step it was resumed from
def test_step_trigger_acts_once_at_due_steps_and_the_last(accumulate: int, begin: int) -> None:
    clock, trainer = StepTrigger("x.every_n_steps", 2), SimpleNamespace(global_step=begin, estimated_stepping_batches=7)
    acted: list[tuple[int, int]] = []
    clock.start(trainer)  # type: ignore[arg-type]
    for step in range(begin, 7):
        for micro_batch in range(accumulate):
            trainer.global_step = step + (micro_batch == accumulate - 1)
            assert clock.step == step
            if clock.ended(trainer) and clock.is_due(clock.step):  # type: ignore[arg-type]
                acted.append((clock.step, micro_batch))
    assert acted == [(step, accumulate - 1) for step in (2, 4, 6, 7) if step > begin]


@pytest.mark.parametrize(
    ("callback", "key"),
    [
        (TrainingMonitor, r"scalars\.every_n_steps"),
        (BranchNorms, r"branch_norms\.every_n_steps"),
        (RouterMonitor, r"experts\.every_n_steps"),
        (Preconditioner, "every_n_steps of Preconditioner"),
    ],
)
def test_callbacks_interval_below_one_is_refused(callback: Any, key: str) -> None:
    with pytest.raises(ValueError, match=f"^{key} is 0;"):
        callback(every_n_steps=0)
