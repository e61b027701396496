"""Sequence of stages, each in a process with a deadline and with a file of its own."""

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.clock import clock_of
from benchmarks.gpu.plan import STAGES, Stage, fitting, in_groups, time_of
from benchmarks.gpu.process import ROOT, Running, Task, read_json, write_json
from lightning_sv.errors import ConfigError
from lightning_sv.gpus import gpu_of_card
from lightning_sv.runs.provenance import Provenance

REPORT = "report.json"
#: for concurrent stages, whose many processes would each start one compiler per core
_FEW = {"TORCHINDUCTOR_COMPILE_THREADS": "2"}


@dataclass
class Runner:
    """Run the stages of one report.

    A call runs the stages that the report lacks and that fit its time; the next call continues.

    Args:
        out: folder of report.json and of one file per stage; an existing report is continued
        work: folder for everything else
        device: 'cuda' or 'cpu'
        toy: if True, use toy sizes
        seconds: time limit of the call
        again: if True, repeat stages that the report contains
        stages: all stages
        tell: function that prints one line per stage

    Raises:
        ConfigError: `out` has a report of another card, or `seconds` suffice for no stage
    """

    out: Path
    work: Path
    device: str = "cuda"
    toy: bool = False
    seconds: float = 560.0
    again: bool = False
    stages: tuple[Stage, ...] = STAGES
    tell: Callable[[str], None] = print

    def __post_init__(self) -> None:
        self.began = time.monotonic()
        made = {
            "provenance": Provenance.now()._asdict(),
            "sources": sources(),
            "toy": self.toy,
            "device": self.device,
        }
        made["card"] = clock_of(self.device).name()
        before = read_json(self.out / REPORT)
        self._check_card(before, made["card"])
        self.report: dict[str, Any] = {"made": made, "stages": before.get("stages", {})}
        for path in sorted(self.out.glob("stage-*.json")):
            self.report["stages"][path.stem.removeprefix("stage-")] = read_json(path)

    def _check_card(self, before: dict[str, Any], card: str) -> None:
        """Check that an existing report is one of this card, with these sizes."""
        if not before:
            return
        ceilings = before.get("stages", {}).get("ceilings", {}).get("figures", {})
        recorded = before["made"].get("card") or ceilings.get("versions", {}).get("device", card)
        if recorded != card or before["made"]["toy"] != self.toy:
            sizes = " with toy sizes" if before["made"]["toy"] else ""
            raise ConfigError(
                f"--out {self.out} has a report of {recorded}{sizes}; expected {card}. Name another"
                " folder."
            )

    @property
    def left(self) -> float:
        """Return the seconds for the remaining stages."""
        return self.began + self.seconds - time.monotonic()

    def run(self, names: list[str] | None = None) -> dict[str, Any]:
        """Run the stages of these names (default all), some concurrently; return the report."""
        todo = [stage for stage in self.stages if self._is_wanted(stage, names)]
        groups = in_groups(todo)
        chosen = fitting(groups, self.left)
        if groups and not chosen:
            shortest = min(time_of(group) for group in groups)
            raise ConfigError(
                f"--seconds is {self.seconds:.0f}; expected at least {shortest:.0f}, for one stage."
            )
        for group in groups:
            if group in chosen:
                self._run_group(group)
            else:
                self._note_unfitting(group)
        self._write()
        return self.report

    def _is_wanted(self, stage: Stage, names: list[str] | None) -> bool:
        if names is not None and stage.name not in names:
            return False
        if self.again or stage.last:
            return True
        entry = self.report["stages"].get(stage.name, {})
        is_done = entry.get("state") == "done" and entry.get("sources") == sources()
        if is_done:
            self.tell(f"{stage.name}: in the report already")
        return not is_done

    def _note_unfitting(self, group: list[Stage]) -> None:
        for stage in group:
            self.tell(f"{stage.name}: no time left; the next call runs it")
            self.report["stages"].setdefault(
                stage.name, {"state": "no time left", "seconds": 0.0, "figures": {}}
            )

    def _run_group(self, group: list[Stage]) -> None:
        running = {stage.name: self._start(stage, alone=len(group) == 1) for stage in group}
        try:
            while running:
                for name, process in list(running.items()):
                    is_over = process.over()
                    self._keep(name, process.outcome())
                    if is_over:
                        del running[name]
                        self._say(name)
                time.sleep(0.1 if self.toy else 0.5)
        finally:
            for process in running.values():
                process.end()

    def _start(self, stage: Stage, *, alone: bool) -> Running:
        options = stage.options | self._known()
        seconds = min(stage.seconds, self.left - 1)
        task = Task(self.device, self.toy, seconds, str(self.work / stage.name), options)
        return Running(stage.target, task, stage.name, None if alone else _FEW)

    def _keep(self, name: str, outcome: dict[str, Any]) -> None:
        """Update the report with a stage's current results, and write them."""
        made = self.report["made"]
        entry = outcome | {
            "sources": sources(),
            "provenance": made["provenance"],
            "card": made["card"],
        }
        before = self.report["stages"].get(name, {})
        self.report["stages"][name] = entry
        if (before.get("state"), before.get("figures")) != (entry["state"], entry["figures"]):
            write_json(self.out / f"stage-{name}.json", entry)
            self._write()

    def _say(self, name: str) -> None:
        entry = self.report["stages"][name]
        line = f"{name}: {entry['state']} after {entry['seconds']:.0f} s"
        if "error" in entry:
            line += f", {entry['error'][-1]}"
        self.tell(line)

    def _known(self) -> dict[str, Any]:
        """Return results that later stages need: the GPU's listed and measured peak, the folder."""
        figures = self.report["stages"].get("ceilings", {}).get("figures", {})
        gpu = gpu_of_card(figures.get("versions", {}).get("device", ""))
        return {
            "peak_tflops": gpu and gpu.half / 1e12,
            "measured_tflops": figures.get("bf16_tflops"),
            "copy_tb_s": figures.get("copy_tb_s"),
            "out": str(self.out),
        }

    def _write(self) -> None:
        self.report["made"]["seconds"] = round(time.monotonic() - self.began, 1)
        write_json(self.out / REPORT, self.report)


def sources() -> str:
    """Return a hash of the code and configs that affect the results, also without git."""
    if not _SOURCES:
        digest = hashlib.sha256()
        for folder in ("lightning_sv", "benchmarks/gpu", "conf"):
            for path in sorted((ROOT / folder).rglob("*")):
                if path.suffix in (".py", ".yaml"):
                    digest.update(
                        json.dumps([str(path.relative_to(ROOT)), path.read_text()]).encode()
                    )
        _SOURCES.append(digest.hexdigest()[:16])
    return _SOURCES[0]


_SOURCES: list[str] = []
