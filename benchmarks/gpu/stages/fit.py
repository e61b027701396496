"""Stage 2b: 20 steps of `lightning-sv fit`, killed and resumed, and host synchronizations.

The corpus consists of Python sources of the machine.
"""

import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from itertools import starmap
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu.process import LAST_LINES, ROOT, Task, python_path, read_json
from benchmarks.gpu.watch import COUNTS, KILL
from lightning_sv.__main__ import main
from lightning_sv.corpus import CorpusConfig, prepare
from lightning_sv.runs.directory import LAST

STEPS = 20
SAVE = 10
DIE = 13
#: runs whose results are compared, if both have ended
COMPARED = (
    ("again", "uninterrupted"),
    ("resumed", "uninterrupted"),
    ("resumed deterministic", "uninterrupted deterministic"),
)
_DETERMINISTIC = ("--trainer.deterministic", "true")


def run(task: Task) -> dict[str, Any]:
    """Prepare a corpus, then train: once, again, killed and resumed, also deterministically."""
    folder = Path(task.work) / "fit"
    found: dict[str, Any] = {"steps": STEPS, "saved_at": SAVE, "killed_after": DIE, "runs": {}}
    corpus = _corpus(folder / "corpus", task.toy)
    began = time.monotonic()
    manifest = prepare(corpus, progress=False)
    found["corpus"] = {
        "train_tokens": manifest.train.tokens,
        "seconds": round(time.monotonic() - began, 1),
    }
    task.save(found)

    runs = _Runs(task, folder, corpus)
    for name, outcome in _trained(runs, task.toy):
        found["runs"][name] = outcome
        task.save(found)

    for name, other in COMPARED:
        if _ended(found["runs"], name) and _ended(found["runs"], other):
            found[f"{name} against {other}"] = compare(runs.folder(name), runs.folder(other))
    counts = read_json(folder / "counts.json")
    found["synchronizations"] = counts or "not counted: the run that counts did not get there"
    return found


def _corpus(folder: Path, toy: bool) -> CorpusConfig:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[: 40 if toy else 400]
    return CorpusConfig(
        dir=str(folder),
        source="files:" + ",".join(map(str, files)),
        tokenizer="bpe:300" if toy else "bpe:1024",
        val_fraction=0.2 if toy else 0.05,
        max_bytes=100_000 if toy else 4_000_000,
    )


def _trained(runs: "_Runs", toy: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and outcome of each run; all but toy runs train at the same time."""
    plans: list[tuple[str, tuple[str, ...]]] = [("uninterrupted", ()), ("resumed", ())]
    if toy:
        yield from starmap(runs.take, plans)
        return
    plans += [("again", ()), ("uninterrupted", _DETERMINISTIC), ("resumed", _DETERMINISTIC)]
    with ThreadPoolExecutor(len(plans)) as pool:
        yield from pool.map(lambda plan: runs.take(*plan), plans)


def _ended(runs: dict[str, Any], name: str) -> bool:
    return runs.get(name, {}).get("exit") == 0


class _Runs:
    """Runs of one corpus, each as a command."""

    def __init__(self, task: Task, folder: Path, corpus: CorpusConfig):
        self.task = task
        self.root = folder
        self.corpus = corpus

    def folder(self, name: str) -> Path:
        return self.root / name.replace(" ", "-")

    def take(self, name: str, more: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
        """Train one run; a run to resume is killed first."""
        name = f"{name} deterministic" if more else name
        arguments = [*self._arguments(), *more, "--run_dir", str(self.folder(name))]
        killed = {}
        if name.startswith("resumed"):
            code, tail, _ = self._command(arguments, name + "-killed", {KILL: str(DIE)})
            if code != -9:
                return name, {"exit": code, "error": ["it was not killed", *tail]}
            killed = {"killed": True}
            arguments += ["--ckpt_path", "last"]
        env = {COUNTS: str(self.root / "counts.json")} if name == "uninterrupted" else {}
        code, tail, seconds = self._command(arguments, name, env)
        outcome: dict[str, Any] = killed | {"exit": code, "seconds": seconds}
        if code == 0:
            outcome["val_loss"] = read_json(self.folder(name) / "summary.json").get("val_loss")
        else:
            outcome["error"] = tail
        return name, outcome

    def _arguments(self) -> list[str]:
        toy = self.task.toy
        layers = ["base", "optim/adamw", "schedule/cos"]
        layers += [
            "trainer/cpu" if self.task.device == "cpu" else "trainer/gpu",
            "data/stdlib",
            "model/mini",
        ]
        arguments = [f"--config={ROOT}/conf/{layer}.yaml" for layer in layers]
        settings = {
            "data.corpus.dir": self.corpus.dir, "data.corpus.tokenizer": self.corpus.tokenizer,
            "data.global_batch": 16, "data.micro_batch": 4, "data.val_sequences": 16, "data.validations": 1,
            "trainer.max_steps": STEPS, "checkpoint.every_n_steps": SAVE,
            "trainer.callbacks": "benchmarks.gpu.watch.Watch",
        }  # fmt: skip
        if toy:
            settings |= {
                "data.seq_len": 32,
                "model.backbone.d_model": 32,
                "model.backbone.n_layer": 1,
            }
        return [*arguments, *(f"--{key}={value}" for key, value in settings.items())]

    def _command(
        self, arguments: list[str], name: str, env: dict[str, str]
    ) -> tuple[int, list[str], float]:
        """Run `lightning-sv fit`; return exit code, last lines, seconds."""
        began = time.monotonic()
        log = self.root / f"{name.replace(' ', '-')}.log"
        with log.open("w") as stream:
            # a toy run in this process, because importing takes longer than the run
            if self.task.toy and KILL not in env:
                with patch.dict(os.environ, env), redirect_stdout(stream), redirect_stderr(stream):
                    code = main(["fit", *arguments])
            else:
                code = subprocess.run(
                    [sys.executable, "-m", "lightning_sv", "fit", *arguments], cwd=self.root, check=False,
                    env=os.environ | {"PYTHONPATH": python_path()} | env, stdout=stream, stderr=stream,
                ).returncode  # fmt: skip
        tail = [line[:300] for line in log.read_text(errors="replace").splitlines()[-LAST_LINES:]]
        return code, tail, round(time.monotonic() - began, 1)


def compare(run: Path, other: Path) -> dict[str, Any]:
    """Compare weights and moments of two runs' last checkpoints bitwise, with differences."""
    ours, theirs = (
        torch.load(path / LAST, map_location="cpu", weights_only=True, mmap=True)
        for path in (run, other)
    )
    pairs = [(ours["state_dict"][name], value) for name, value in theirs["state_dict"].items()]
    weights = len(pairs)
    for a, b in zip(ours["optimizer_states"], theirs["optimizer_states"], strict=True):
        for key, theirs_of in b["state"].items():
            ours_of = a["state"][key]
            pairs += [(ours_of[moment], theirs_of[moment]) for moment in ("exp_avg", "exp_avg_sq")]
    equal = all(torch.equal(a, b) for a, b in pairs)
    apart = [
        float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))
        for a, b in pairs[:weights]
    ]
    return {
        "bit_equal": equal,
        "steps": [ours["global_step"], theirs["global_step"]],
        "weights_apart": max(apart),
    }
