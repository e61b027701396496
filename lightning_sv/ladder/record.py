"""Run directories of a ladder, in the format that `fit` leaves and `report` reads."""

import json
import math
import tarfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from lightning_sv.corpus import Tokenizer
from lightning_sv.ladder.plan import Ladder, RunPlan
from lightning_sv.ladder.trainee import Trainee
from lightning_sv.runs.directory import CONFIG, SUMMARY, event_files, write_atomically
from lightning_sv.runs.provenance import Provenance
from lightning_sv.whole import whole


class RunRecord:
    """The directory of one run: config, tokenizer, events, and at its end the summary.

    Args:
        root: holds the directories of all runs
        trainee: the run
    """

    def __init__(self, root: Path, trainee: Trainee):
        self.dir, self.trainee = root / trainee.run.name, trainee
        self.dir.mkdir(parents=True, exist_ok=True)
        config = yaml.safe_dump(run_config(trainee.run, trainee.ladder), sort_keys=False)
        (self.dir / CONFIG).write_text(config)
        Tokenizer.load(trainee.ladder.corpus.dir).save(self.dir)
        if not trainee.done:  # events of a part that ended before its first checkpoint
            for file in event_files(self.dir):
                file.unlink()
        self._events: EventFileWriter | None = None
        # What a checkpoint holds was written before it.
        self._written, self._validations = trainee.done, len(trainee.validations)

    def write(self) -> None:
        """Append what the run logged since the last time; the device must have finished what was put on it."""
        trainee, ladder = self.trainee, self.trainee.ladder
        if self._events is None:
            self._events = EventFileWriter(str(self.dir))
        losses, norms, rates = (x.tolist() for x in (trainee.losses, trainee.norms, trainee.rates))
        first = self._written // ladder.log_every + 1
        for step in range(first * ladder.log_every, trainee.done + 1, ladder.log_every):
            mean = math.fsum(losses[step - ladder.log_every : step]) / ladder.log_every
            self._add(step, {"train/loss": mean, "lr": rates[step - 1], "grad_norm": norms[step - 1]})
        for step, nats in trainee.validations[self._validations :]:
            loss = float(nats)
            self._add(step, {"val/loss": loss, "val/perplexity": math.exp(min(loss, 80.0))})
        self._events.flush()
        self._written, self._validations = trainee.done, len(trainee.validations)

    def _add(self, step: int, values: dict[str, float]) -> None:
        assert self._events is not None
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        tokens = step * self.trainee.ladder.tokens_per_step
        self._events.add_event(Event(wall_time=time.time(), step=tokens, summary=summary))

    def finish(self, seconds: float) -> bool:
        """Write the summary of a run that took its last step; whether all its losses are finite.

        A run that is not finite gets none: nothing is compared with it.

        Args:
            seconds: the run's share of the time in which its rung was trained
        """
        if self._events is not None:
            self._events.close()
        trainee = self.trainee
        loss = float(trainee.validations[-1][1])
        if not math.isfinite(loss) or not bool(torch.isfinite(trainee.losses).all()):
            return False

        run = trainee.run
        summary = {
            "label": run.arm.label,
            "meaning": str(trainee.net.canonical),
            "model": run.rung.name,
            "seed": run.seed,
            "steps": run.steps,
            "skipped_steps": 0,
            "tokens": run.steps * trainee.ladder.tokens_per_step,
            "parameters": trainee.parameters,
            "activated_parameters": trainee.activated,
            "lr": run.arm.lr,
            **trainee.text.manifest.loss_figures(loss),
            "seconds": seconds,
            "legs": [{"steps": run.steps, "max_steps": run.steps, "seconds": seconds}],
            "origin": None,  # its own initialization
            "torch": torch.__version__,
            **Provenance.now()._asdict(),
        }
        write_atomically(self.dir / SUMMARY, json.dumps(summary, indent=2) + "\n")
        return True


def run_config(run: RunPlan, ladder: Ladder) -> dict[str, Any]:
    """What `fit` would be given to train the same run, with its keys."""
    return {
        "seed_everything": run.seed,
        "model": {
            "backbone": asdict(run.backbone),
            "scale": run.arm.label,
            "optim": asdict(ladder.optim) | {"lr": run.arm.lr},
            "schedule": asdict(ladder.schedule),
            "tokens_per_param": float(run.rung.tokens_per_param),
        },
        "data": {
            "corpus": asdict(ladder.corpus),
            "seq_len": ladder.seq_len,
            "global_batch": ladder.global_batch,
            "validations": ladder.validations,
            "val_sequences": ladder.val_sequences,
        },
        "trainer": {"max_steps": run.steps, "gradient_clip_val": ladder.clip},
    }


def pack(runs: Path, archive: Path) -> None:
    """Put all run directories into one tar.gz, replaced in one step."""
    with whole(archive) as partial, tarfile.open(partial, "w:gz") as tar:
        tar.add(runs, arcname="runs")
