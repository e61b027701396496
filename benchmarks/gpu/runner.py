"""Sequence of stages, each in a process with a deadline; the report is written after each."""

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.process import ROOT, Running, Task, read_json, write_json
from lightning_sv.gpus import gpu_of_card
from lightning_sv.runs.provenance import Provenance

REPORT = "report.json"


@dataclass(frozen=True)
class Stage:
    """One part of the report.

    Attributes:
        name: name on the command line and in the report.
        target: 'module:function'.
        seconds: time limit, or less if less remains in total.
        beside: if True, it runs concurrently with the previous stage, because neither is timed.
        options: options of the function.
    """

    name: str
    target: str
    seconds: float
    beside: bool = False
    options: dict[str, Any] = field(default_factory=dict)


#: arms that compile a full model are last: at 1B that could take all of the stage's time
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
    # several models of 1B leave no room for the large micro-batch
    Stage("overhead-1b", "benchmarks.gpu.stages.overhead:run", 125, options={"size": "1b", "batches": ["protocol"]}),
    Stage("moe", "benchmarks.gpu.stages.overhead:run", 45, options={"size": "moe-0.25b", "arms": ["llama", "unified"]}),
    Stage("peers", "benchmarks.gpu.stages.overhead:run", 70,
          options={"size": "0.12b", "arms": PEER_ARMS, "batches": ["protocol"]}),
    Stage("profile", "benchmarks.gpu.stages.kernels:run", 45),
    Stage("cache", "benchmarks.gpu.stages.cache:run", 20),
    Stage("peers-1b", "benchmarks.gpu.stages.overhead:run", 80,
          options={"size": "1b", "arms": PEER_ARMS[:3], "batches": ["protocol"]}),
)  # fmt: skip


#: for concurrent stages, whose many processes would each start one compiler per core
_FEW = {"TORCHINDUCTOR_COMPILE_THREADS": "2"}


@dataclass
class Runner:
    """Run the stages of one report.

    Args:
        out: folder of report.json; an existing report of this machine is continued.
        work: folder for everything else.
        device: 'cuda' or 'cpu'.
        toy: if True, use toy sizes.
        seconds: time limit of the report.
        again: if True, repeat stages that the report contains.
        stages: all stages.
        tell: function that prints one line per stage.
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
        """Return the seconds for the remaining stages."""
        return self.began + self.seconds - time.monotonic()

    def run(self, names: list[str] | None = None) -> dict[str, Any]:
        """Run the stages of these names (default all), some concurrently; return the report."""
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
        """Update the report with a stage's current results, and write it."""
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
        """Return results that later stages need: the GPU's listed and measured peak, and the output folder."""
        figures = self.report["stages"].get("ceilings", {}).get("figures", {})
        gpu = gpu_of_card(figures.get("versions", {}).get("device", ""))
        return {
            "peak_tflops": gpu and gpu.half / 1e12,
            "measured_tflops": figures.get("bf16_tflops"),
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
                    digest.update(json.dumps([str(path.relative_to(ROOT)), path.read_text()]).encode())
        _SOURCES.append(digest.hexdigest()[:16])
    return _SOURCES[0]


_SOURCES: list[str] = []
