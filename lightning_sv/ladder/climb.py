"""Training a rung: all its models side by side, until they are done or the time is over."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

from lightning_sv.ladder.lane import Lane
from lightning_sv.ladder.plan import Ladder, Rung, plain, runs_of
from lightning_sv.ladder.record import RunRecord, run_config
from lightning_sv.ladder.text import Text
from lightning_sv.ladder.trainee import WARM_UP, Trainee
from lightning_sv.runs.checkpoint import check_archive
from lightning_sv.runs.directory import CONFIG, is_complete
from lightning_sv.whole import whole

#: steps of a model that are put on its lane at once; the host runs at most one such round ahead
ROUND = 10


class Clock:
    """The time a part has.

    Args:
        minutes: from `began` on, all included
        began: `time.monotonic` at the start of the command
    """

    def __init__(self, minutes: float, began: float):
        self.end = began + 60 * minutes
        #: seconds that the last checkpoint and its events took
        self.saving = 0.0

    @property
    def left(self) -> float:
        """Seconds that remain for training: twice the last checkpoint and 10 s are kept for the end."""
        return self.end - time.monotonic() - 2 * self.saving - 10


class Climb:
    """The models of one rung.

    Args:
        ladder: the plan
        rung: the size of the plan that is trained
        text: the corpus on the device
        state: folder of run directories and of the rung's checkpoint, `<rung>.pt`, which is continued if it is there
        lanes: streams; models share them evenly
        compile: what of a model is compiled, see `COMPILE`
        graphs: whether steps are recorded as CUDA graphs
        say: prints a line

    Raises:
        ValueError: the checkpoint is of another plan, or the models do not fit the device
    """

    def __init__(
        self,
        ladder: Ladder,
        rung: Rung,
        text: Text,
        state: Path,
        *,
        lanes: int,
        compile: str,
        graphs: bool = True,
        say: Callable[[str], None],
    ):
        self.rung, self.ladder, self.say = rung, ladder, say
        self.file = state / f"{rung.name}.pt"
        self.device = text.train.device
        self._plan = {"ladder": plain(ladder), "corpus": text.manifest.corpus_hash}
        runs = runs_of(ladder, rung)
        self.lanes = [Lane(self.device, graphs=graphs) for _ in range(min(lanes, len(runs)))]
        try:
            self.models = [
                Trainee(run, ladder, text, self.lanes[i % len(self.lanes)], compile=compile)
                for i, run in enumerate(runs)
            ]
        except torch.OutOfMemoryError as error:
            raise _too_large(rung, len(self.lanes)) from error
        self.seconds = 0.0
        self._load()
        self.records = [RunRecord(state / "runs", model) for model in self.models]

    def _load(self) -> None:
        if not self.file.is_file():
            return
        check_archive(self.file)
        saved = torch.load(self.file, map_location=self.device, weights_only=True)
        if saved["plan"] != self._plan:
            raise ValueError(
                f"{self.file} is of another plan or corpus; continue with the same one, or choose another --state."
            )
        self.seconds = saved["seconds"]
        for model, state in zip(self.models, saved["models"], strict=True):
            model.load(state)

    def record(self) -> None:
        """Take the first steps as they are, which also compiles, then record every model's step."""
        began = time.monotonic()
        try:
            for model in self.models:
                if not model.finished:
                    model.advance(WARM_UP)
            self._wait()
            for model in self.models:
                if not model.finished:
                    model.record()
            self._wait()
        except torch.OutOfMemoryError as error:
            raise _too_large(self.rung, len(self.lanes)) from error
        self.say(f"{self.rung.name}: {len(self.models)} models on {len(self.lanes)} lanes, ready after "
                 f"{time.monotonic() - began:.0f} s{self._memory()}")  # fmt: skip

    def run(self, clock: Clock, save_every: float) -> bool:
        """Train until all models are done or the clock says stop, with a checkpoint then; whether they are done.

        Args:
            clock: of the part
            save_every: seconds between two checkpoints
        """
        began = saved = measured = time.monotonic()
        before, first = self.seconds, self._steps_left()
        told = False
        while active := [model for model in self.models if not model.finished]:
            for model in active:
                model.advance(ROUND)
            for lane in self.lanes:
                lane.mark()
                lane.keep_up(behind=1)
            now = time.monotonic()
            if not told and now - began > 5 and (taken := first - self._steps_left()):
                self._tell(taken / (now - began), clock)
                told = True
            self.seconds = before + now - began
            if now - saved > save_every:
                self.save(clock)
                saved = time.monotonic()
            if clock.left < 0:
                break
        self._wait()
        self.seconds = before + time.monotonic() - began
        if first and time.monotonic() - measured > 0:
            rate = (first - self._steps_left()) * self.ladder.tokens_per_step / (time.monotonic() - measured)
            self.say(f"{self.rung.name}: {rate:,.0f} tokens/s over all models, checkpoints and validations included")
        self.save(clock)
        return all(model.finished for model in self.models)

    def save(self, clock: Clock) -> None:
        """Write events, then the checkpoint of all models, in one step each."""
        began = time.monotonic()
        self._wait()
        for record in self.records:
            record.write()
        states: dict[str, Any] = {"plan": self._plan, "seconds": self.seconds}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with whole(self.file) as partial, partial.open("wb") as file:
            torch.save(states | {"models": [model.state() for model in self.models]}, file)
        clock.saving = time.monotonic() - began

    def finish(self) -> list[str]:
        """Write the summaries of a rung whose models are done; names of runs that were not finite and got none."""
        share = self.seconds / len(self.models)
        return [record.trainee.run.name for record in self.records if not record.finish(share)]

    def _steps_left(self) -> int:
        return sum(model.run.steps - model.done for model in self.models)

    def _tell(self, rate: float, clock: Clock) -> None:
        """Say whether the rung fits the part, and what budget would."""
        need, have = self._steps_left() / rate, clock.left
        steps = self.models[0].run.steps
        words = f"needs {need:,.0f} s more of the {have:,.0f} s left"
        if need > have:
            done = self.models[0].done
            fits = self.rung.tokens_per_param * (done + have * rate / len(self.models)) / steps
            words += f"; it continues in the next part, or fits with --tokens_per_param {fits:.3g} from its start"
        tokens = rate * self.ladder.tokens_per_step
        self.say(f"{self.rung.name}: {steps:,} steps each, {tokens:,.0f} tokens/s over all models: {words}")

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _memory(self) -> str:
        if self.device.type != "cuda":
            return ""
        return f", {torch.cuda.max_memory_reserved(self.device) / 2**30:.1f} GiB reserved"


def rung_complete(state: Path, ladder: Ladder, rung: Rung) -> bool:
    """Whether every run of a rung has its summary.

    Raises:
        ValueError: one is there that another plan has made
    """
    runs = runs_of(ladder, rung)
    found = [run for run in runs if is_complete(state / "runs" / run.name)]
    for run in found:
        folder = state / "runs" / run.name
        if yaml.safe_load((folder / CONFIG).read_text()) != run_config(run, ladder):
            raise ValueError(f"{folder} was trained by another plan; choose another --state, or remove it.")
    return len(found) == len(runs)


def _too_large(rung: Rung, lanes: int) -> ValueError:
    return ValueError(
        f"rung {rung.name} does not fit the device on {lanes} lanes; lower --lanes, or the plan's global_batch."
    )
