"""A loss or gradient that is not finite: never stepped on, and its batch is known by number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sv.corpus import open_split
from lightning_sv.lit.module import PretrainModule
from tests.conftest import argv
from tests.faults.conftest import Tally
from tests.lit.runs import LAST, differences, events, load, run_fit

pytestmark = pytest.mark.faults
SEQ_LEN = 32
BATCH = 32


class Injection:
    """Spoils micro-batch `part` of the given steps: its loss, or the gradient of one matrix of a
    finite loss."""

    def __init__(self, patch: pytest.MonkeyPatch, what: str, steps: set[int], part: int = 0):
        self.value = float(what.split()[0])
        self.gradient = what.endswith("gradient")
        self.steps = steps
        self.part = part
        self.module: PretrainModule | None = None
        #: micro-batches of each step, as the model saw them
        self.blocks: dict[int, list[Tensor]] = {}
        self._loss = PretrainModule.loss
        patch.setattr(PretrainModule, "loss", lambda module, block: self(module, block))

    def __call__(self, module: PretrainModule, block: Tensor) -> Any:
        loss, routings = self._loss(module, block)
        if not module.trainer.training or module.trainer.validating:
            return loss, routings
        self.module = module
        step = module.global_step
        seen = self.blocks.setdefault(step, [])
        if step in self.steps and len(seen) == self.part:
            if self.gradient:
                self._spoil_gradient(next(p for p in module.net.parameters() if p.dim() == 2))
            else:
                loss = loss * self.value
        seen.append(block)
        return loss, routings

    def _spoil_gradient(self, weight: Tensor) -> None:
        """Multiply the next gradient of a weight."""

        def multiply(gradient: Tensor) -> Tensor:
            hook.remove()
            return gradient * self.value

        hook = weight.register_hook(multiply)


@pytest.fixture
def args(short_args: list[str]) -> list[str]:
    return [*short_args, *argv("--scalars.every_n_steps 1 --checkpoint.every_n_steps 1")]


def same_blocks(event: dict[str, Any], seen: list[Tensor], short_corpus: Path) -> bool:
    split = open_split(short_corpus, "train", seq_len=SEQ_LEN)
    return torch.equal(torch.stack([split[n] for n in event["blocks"]]), torch.cat(seen))


def model_is_unchanged(module: PretrainModule, run: Path, step: int) -> bool:
    """Return if model and optimizer are those of the checkpoint before `step`, or initialized."""
    if step == 0:
        settings = module.settings
        strategy = (settings.strategy, settings.scale_options)
        fresh = type(module.net)(settings.backbone, *strategy, seed=0)
        weights = dict(module.net.state_dict())
        return not (run / LAST).exists() and not differences(dict(fresh.state_dict()), weights)
    before = load(run)
    weights = {name: value.detach() for name, value in module.state_dict().items()}
    state = [module.optimizers().optimizer.state_dict()]
    different = differences(dict(before["state_dict"]), weights)
    different += differences(before["optimizer_states"], state)
    return before["global_step"] == step and not different


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("optim", ["adamw", "muon"])
@pytest.mark.parametrize("what", ["nan loss", "inf loss", "nan gradient", "inf gradient"])
@pytest.mark.parametrize(("step", "part"), [(0, 1), (4, 0), (10, 1)])
def test_fit_nonfinite_loss_or_gradient_stops_before_the_step(
    step: int, part: int, what: str, optim: str, precision: str, args: list[str],
    short_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], tally: Tally,
) -> None:  # fmt: skip
    args = [*args, "--model.optim.name", optim, "--trainer.precision", precision]
    run = tmp_path / "run"
    injection = Injection(monkeypatch, what, {step}, part)
    code = run_fit(args, run)
    lines = capsys.readouterr().err.splitlines()
    (error,) = [line for line in lines if line.startswith("error: ")]
    told = code == 1 and f"before step {step + 1}" in error

    (event,) = events(run)
    per_epoch = len(open_split(short_corpus, "train", seq_len=SEQ_LEN)) // BATCH
    expected = {"step": step, "epoch": step // per_epoch}
    known = expected.items() <= event.items() and len(event["losses"]) == 2 and "commit" in event
    known &= same_blocks(event, injection.blocks[step], short_corpus)

    kept = model_is_unchanged(injection.module, run, step)
    tally(f"{what}, stopped", told and known and kept, told, known, kept, event)
