"""The stages in their order: each with a deadline, in a process of its own; the report is written after each."""

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.process import ROOT, Running, Task, read_json, write_json
from lightning_sv.nn.gpus import gpu_of_card
from lightning_sv.runs.provenance import Provenance

REPORT = "report.json"


@dataclass(frozen=True)
class Stage:
    """One part of the report.

    Attributes:
        name: on the command line and in the report.
        target: 'module:function'.
        seconds: its deadline, less where the whole has less left.
        beside: runs beside the stage before it, as neither is timed.
        options: of the function.
    """

    name: str
    target: str
    seconds: float
    beside: bool = False
    options: dict[str, Any] = field(default_factory=dict)


#: those that compile a whole model come last: at 1B that alone would take the stage's time
PEER_ARMS = (
    "llama", "Hugging Face", "Hugging Face liger", "Hugging Face compiled", "litgpt compiled", "torchtitan compiled",
    "litgpt compiled, loss in one",
)  # fmt: skip
STAGES = (
    Stage("ceilings", "benchmarks.gpu.stages.ceilings:run", 45),
    Stage("correctness", "benchmarks.gpu.stages.correctness:run", 120),
    Stage("fit", "benchmarks.gpu.stages.fit:run", 120, beside=True),
    Stage("warm", "benchmarks.gpu.stages.warm:run", 120, beside=True),
    Stage("overhead-0.12b", "benchmarks.gpu.stages.overhead:run", 60, options={"size": "0.12b"}),
    Stage("overhead-1b", "benchmarks.gpu.stages.overhead:run", 125, options={"size": "1b"}),
    Stage("moe", "benchmarks.gpu.stages.overhead:run", 45, options={"size": "moe-0.25b", "arms": ["llama", "unified"]}),
    Stage("peers", "benchmarks.gpu.stages.overhead:run", 70,
          options={"size": "0.12b", "arms": PEER_ARMS, "batches": ["protocol"]}),
    Stage("profile", "benchmarks.gpu.stages.kernels:run", 45),
    Stage("cache", "benchmarks.gpu.stages.cache:run", 20),
    Stage("peers-1b", "benchmarks.gpu.stages.overhead:run", 80,
          options={"size": "1b", "arms": PEER_ARMS[:3], "batches": ["protocol"]}),
)  # fmt: skip


#: for stages beside each other, which are many processes: each would start as many compilers as there are cores
_FEW = {"TORCHINDUCTOR_COMPILE_THREADS": "2"}


@dataclass
class Runner:
    """Takes the stages through one report.

    Args:
        out: folder of report.json; a report of this machine that is there is continued.
        work: folder for everything else.
        device: 'cuda' or 'cpu'.
        toy: sizes of the suite.
        seconds: for all of it.
        again: repeat what the report has.
        stages: all that there are.
        tell: is told one line a stage.
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
        here = {"provenance": Provenance.now()._asdict(), "sources": sources(), "toy": self.toy, "device": self.device}
        before = read_json(self.out / REPORT)
        same = before.get("made", {}).get("provenance", {}).get("machine") == here["provenance"]["machine"]
        same = same and before["made"]["toy"] == self.toy and before["made"]["device"] == self.device
        self.report: dict[str, Any] = {"made": here, "stages": before.get("stages", {}) if same else {}}

    @property
    def left(self) -> float:
        """Seconds for the stages to come."""
        return self.began + self.seconds - time.monotonic()

    def run(self, names: list[str] | None = None) -> dict[str, Any]:
        """Run the stages of these names (all), those beside each other together; return the report."""
        todo = [stage for stage in self.stages if (names is None or stage.name in names) and not self._done(stage)]
        groups: list[list[Stage]] = []
        for stage in todo:
            if stage.beside and groups:
                groups[-1].append(stage)
            else:
                groups.append([stage])
        for group in groups:
            self._group(group)
        self._write()
        return self.report

    def _done(self, stage: Stage) -> bool:
        found = self.report["stages"].get(stage.name, {})
        done = not self.again and found.get("state") == "done" and found.get("sources") == sources()
        if done:
            self.tell(f"{stage.name}: in the report already")
        return done

    def _group(self, group: list[Stage]) -> None:
        if self.left < 5:
            for stage in group:
                self.report["stages"].setdefault(stage.name, {"state": "no time left", "seconds": 0.0, "figures": {}})
            return
        running = {}
        for stage in group:
            options = stage.options | self._known()
            task = Task(self.device, self.toy, min(stage.seconds, self.left - 1), str(self.work / stage.name), options)
            running[stage.name] = Running(stage.target, task, stage.name, _FEW if len(group) > 1 else None)
        try:
            while running:
                for name, process in list(running.items()):
                    over = process.over()
                    self._keep(name, process.outcome())
                    if over:
                        del running[name]
                        self._say(name)
                time.sleep(0.1 if self.toy else 0.5)
        finally:
            for process in running.values():
                process.end()

    def _keep(self, name: str, outcome: dict[str, Any]) -> None:
        """Put what a stage has by now into the report, and the report on the disk."""
        entry = outcome | {"sources": sources()}
        before = self.report["stages"].get(name, {})
        self.report["stages"][name] = entry
        if (before.get("state"), before.get("figures")) != (entry["state"], entry["figures"]):
            self._write()

    def _say(self, name: str) -> None:
        found = self.report["stages"][name]
        last = found.get("error", [""])[-1]
        self.tell(f"{name}: {found['state']} after {found['seconds']:.0f} s{', ' + last if last else ''}")

    def _known(self) -> dict[str, Any]:
        """What later stages use of earlier ones: the card's peak by its data sheet, the measured one, and where to."""
        figures = self.report["stages"].get("ceilings", {}).get("figures", {})
        gpu = gpu_of_card(figures.get("versions", {}).get("device", ""))
        return {
            "peak_tflops": gpu and gpu.bf16 / 1e12,
            "measured_tflops": figures.get("bf16_tflops"),
            "out": str(self.out),
        }

    def _write(self) -> None:
        self.report["made"]["seconds"] = round(time.monotonic() - self.began, 1)
        write_json(self.out / REPORT, self.report)


def sources() -> str:
    """A hash of the code and configs that decide the figures; a copy without git has it too."""
    if not _SOURCES:
        digest = hashlib.sha256()
        for folder in ("lightning_sv", "benchmarks/gpu", "conf"):
            for path in sorted((ROOT / folder).rglob("*")):
                if path.suffix in (".py", ".yaml"):
                    digest.update(json.dumps([str(path.relative_to(ROOT)), path.read_text()]).encode())
        _SOURCES.append(digest.hexdigest()[:16])
    return _SOURCES[0]


_SOURCES: list[str] = []
