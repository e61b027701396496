"""The steps at which callbacks act, and arguments out of range."""

import math
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from torch import nn

from lightning_sv import callbacks
from lightning_sv.callbacks import CopyingMonitor, StepCallback
from lightning_sv.callbacks.run_state import evaluation_mode
from lightning_sv.callbacks.steps import StepTrigger, known_steps, log_spaced, total_steps
from lightning_sv.errors import ConfigError
from tests.callbacks.stub import run_of
from tests.lit.own_trainer import column, loader, module, trainer


@pytest.mark.parametrize(("every", "chosen"), [(2, []), (None, [8])])
def test_step_trigger_counts_all_steps_of_a_batch(every: int | None, chosen: list[int]) -> None:
    """With two optimizers, or when a batch passes the last step."""
    clock = StepTrigger("x.every_n_steps", every)
    trainer = run_of(7, global_step=7)
    clock.start(trainer, chosen)
    trainer.global_step = 9
    # 8 is one of its steps, 11 a later one that the caller knows
    assert clock.ended(trainer) and clock.is_due(9) and not clock.is_due(11)
    trainer.global_step = 6
    clock.start(trainer)
    trainer.global_step = 8
    assert clock.ended(trainer) and clock.is_due(8) and clock.is_at_end()


class TwoFigures(StepCallback):
    tag = "two"

    def act(self, trainer: Any, pl_module: Any) -> None:
        self.write(trainer, {"step": trainer.global_step, "norm": torch.tensor(0.5)})


@pytest.mark.filterwarnings("ignore")  # Lightning warns about few workers
@pytest.mark.parametrize("accumulate", [1, 3])
def test_step_callback_writes_once_at_its_steps_and_the_last(
    accumulate: int, tmp_path: Path
) -> None:
    """A resumed run does not write again at the step that it resumes."""

    def written(folder: Path, *callbacks: L.Callback, resume: Path | None = None) -> list[float]:
        run = trainer(
            folder, TwoFigures(2), *callbacks, max_steps=7, accumulate_grad_batches=accumulate
        )
        run.fit(module(), loader(), ckpt_path=resume, weights_only=True)
        assert set(column(folder, "two/norm")) == {0.5}
        return column(folder, "two/step")

    keep = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=4, save_top_k=-1)
    assert written(tmp_path / "whole", keep) == [0, 2, 4, 6, 7]
    assert written(tmp_path / "resumed", resume=tmp_path / "step=4.ckpt") == [6, 7]


@pytest.mark.parametrize(("points", "steps"), [(2, [2, 5]), (8, [1, 2, 3, 4, 5])])
def test_held_out_probe_measures_after_the_first_step(points: int, steps: list[int]) -> None:
    assert CopyingMonitor(points=points).chosen_steps(run_of(5)) == steps


@pytest.mark.parametrize(
    ("max_steps", "estimated", "n_optimizers", "callbacks", "expected"),
    [
        (7, 7, 1, [], 7),
        (-1, 12, 1, [], 12),
        (-1, math.inf, 1, [], None),  # only max_time ends the run
        (7, 7, 2, [], 7),
        (-1, 12, 2, [], None),
        (-1, 12, 1, [GradientAccumulationScheduler({0: 1, 1: 2})], None),
    ],
)
def test_total_steps_are_unknown_if_batches_do_not_tell_them(
    max_steps: int, estimated: float, n_optimizers: int, callbacks: list[Any], expected: int | None
) -> None:
    optimizers = [None for _ in range(n_optimizers)]
    trainer = run_of(estimated, max_steps=max_steps, optimizers=optimizers, callbacks=callbacks)
    assert total_steps(trainer) == expected
    if expected is None:
        with pytest.raises(ConfigError, match="^max_steps is"):
            known_steps(trainer, "ScaleVectorMonitor")


def test_log_spaced_of_a_short_run_begins_at_step_1() -> None:
    assert log_spaced(64, 5) == [0, 1, 4, 16, 64]
    assert log_spaced(2, 5) == [0, 1, 2]
    assert log_spaced(64, 2) == [0, 64]


PERIODIC = ("TrainingMonitor", "BranchNorms", "RouterMonitor", "ScaleVectorMonitor")
SHARPNESS = {"points": 1, "hutchinson_probes": 1, "subsets": [], "sequences": 0}


@pytest.mark.parametrize(
    ("callback", "key", "value"),
    [
        *((callback, "every_n_steps", 0) for callback in PERIODIC),
        *(("CopyingMonitor", key, 0) for key in ("points", "sequences", "repeat_length")),
        *(("Sharpness", key, value) for key, value in SHARPNESS.items()),
    ],
)
def test_callbacks_argument_out_of_range_is_refused(callback: str, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{key} of {callback} is "):
        getattr(callbacks, callback)(**{key: value})


def test_evaluation_mode_restores_the_mode_of_every_module() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Dropout())
    model[1].eval()
    with pytest.raises(KeyError), evaluation_mode(model):
        assert not model[0].training
        raise KeyError
    assert model.training and model[0].training and not model[1].training
