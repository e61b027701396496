"""A loss or gradient that is not finite: never stepped on, and its batch is known by number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sv.corpus import open_split
from lightning_sv.lit.checkpoint.atomic_io import AtomicCheckpointIO
from lightning_sv.lit.module import PretrainModule
from lightning_sv.runs.events import read_run
from tests.conftest import argv
from tests.faults.conftest import Tally
from tests.lit.runs import LAST, differences, events, load, run_fit, same_checkpoint, same_curves

pytestmark = pytest.mark.faults
STEPS = 12
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
                weight = next(p for p in module.net.parameters() if p.dim() == 2)
                hook = weight.register_hook(
                    lambda gradient: (hook.remove(), gradient * self.value)[1]
                )
            else:
                loss = loss * self.value
        seen.append(block)
        return loss, routings


@pytest.fixture
def args(short_args: list[str]) -> list[str]:
    return [*short_args, *argv("--scalars.every_n_steps 1 --checkpoint.every_n_steps 1")]


def same_blocks(event: dict[str, Any], seen: list[Tensor], short_corpus: Path) -> bool:
    split = open_split(short_corpus, "train", seq_len=SEQ_LEN)
    return torch.equal(torch.stack([split[n] for n in event["blocks"]]), torch.cat(seen))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("optim", ["adamw", "muon"])
@pytest.mark.parametrize("what", ["nan loss", "inf loss", "nan gradient", "inf gradient"])
def test_fit_nonfinite_loss_or_gradient_stops_before_the_step(
    what: str,
    optim: str,
    precision: str,
    args: list[str],
    short_corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tally: Tally,
) -> None:
    args = [*args, "--model.optim.name", optim, "--trainer.precision", precision]
    for step, part in ((0, 1), (4, 0), (10, 1)):
        run = tmp_path / f"run{step}"
        with monkeypatch.context() as patch:
            injection = Injection(patch, what, {step}, part)
            code = run_fit(args, run)
        errors = [
            line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")
        ]
        told = code == 1 and len(errors) == 1 and f"before step {step + 1}" in errors[0]
        (event,) = events(run)
        per_epoch = len(open_split(short_corpus, "train", seq_len=SEQ_LEN)) // BATCH
        known = (event["step"], event["epoch"]) == (step, step // per_epoch)
        known &= (
            same_blocks(event, injection.blocks[step], short_corpus)
            and len(event["losses"]) == 2
            and "commit" in event
        )
        module = injection.module
        assert module is not None
        if step:
            before = load(run)
            ours = {name: value.detach() for name, value in module.state_dict().items()}
            kept = (
                before["global_step"] == step
                and differences(dict(before["state_dict"]), ours) == []
            )
            kept &= (
                differences(
                    before["optimizer_states"], [module.optimizers().optimizer.state_dict()]
                )
                == []
            )
        else:
            made = module.settings
            fresh = type(module.net)(made.backbone, made.strategy, made.scale_options, seed=0)
            kept = differences(dict(fresh.state_dict()), dict(module.net.state_dict())) == []
            kept &= not (run / LAST).exists()
        tally(f"{what}, stopped", told and known and kept, told, known, kept, event)


@pytest.mark.parametrize("optim", ["adamw", "muon"])
@pytest.mark.parametrize("what", ["nan loss", "inf gradient"])
def test_fit_nonfinite_loss_or_gradient_skips_the_step(
    what: str,
    optim: str,
    args: list[str],
    short_corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tally: Tally,
) -> None:
    args = [
        *args,
        "--model.optim.name",
        optim,
        *argv(f"--model.nonfinite skip --trainer.max_steps {STEPS}"),
    ]
    whole = tmp_path / "whole"
    run = tmp_path / "run"
    steps = {0, 4, 5, 10}
    kept: dict[int, dict[str, Any]] = {}
    stop_at = 0
    save = AtomicCheckpointIO.save_checkpoint

    def keep(self: AtomicCheckpointIO, checkpoint: dict, path: object, **more: object) -> None:
        save(self, checkpoint, path)
        kept[checkpoint["global_step"]] = torch.load(str(path), weights_only=True)
        if checkpoint["global_step"] == stop_at:
            raise KeyboardInterrupt

    monkeypatch.setattr(AtomicCheckpointIO, "save_checkpoint", keep)
    injection = Injection(monkeypatch, what, steps, part=1)
    assert run_fit(args, whole) == 0
    for step in sorted(steps - {0}):
        same = differences(kept[step]["state_dict"], kept[step + 1]["state_dict"]) == []
        (one,) = kept[step]["optimizer_states"]
        (two,) = kept[step + 1]["optimizer_states"]
        same &= differences(one["state"], two["state"]) == []
        tally(f"{what}, step left out", same)
    assert differences(kept[2]["state_dict"], kept[3]["state_dict"])
    assert not kept[1]["optimizer_states"][0]["state"]
    lines = events(whole)
    assert [line["step"] for line in lines] == sorted(steps)
    assert all(same_blocks(line, injection.blocks[line["step"]], short_corpus) for line in lines)
    assert json.loads((whole / "summary.json").read_text())["skipped_steps"] == 4
    skipped = read_run(whole).curve("skipped_steps")
    assert skipped.values.tolist() == [1, 1, 1, 1, 2, 3, 3, 3, 3, 3, 4, 4]
    losses = read_run(whole).curve("train/loss")
    per_step = SEQ_LEN * BATCH
    assert losses.tokens.tolist() == [per_step * (s + 1) for s in range(STEPS) if s not in steps]

    for stop_at in (5, 8):  # noqa: B007 (keep reads it)
        injection.blocks.clear()
        assert run_fit([*args, "--ckpt_path", "last"], run) == 130
    stop_at = 0
    injection.blocks.clear()
    assert run_fit([*args, "--ckpt_path", "last"], run) == 0
    same_checkpoint(whole, run)
    same_curves(whole, run)
    assert events(run) == lines
    assert json.loads((run / "summary.json").read_text())["skipped_steps"] == 4
