"""A training run that is to be had: its command, its directory, and whether it is there already.

A run's directory holds ``command.json``, the command it answers to with a hash of every file that
the command names, so that a second call trains only what is missing, from the last checkpoint on.
"""

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from lightning_sv.runs.claim import remove
from lightning_sv.runs.directory import COMMAND, LAST, LOG, is_complete

#: the program of a run, where nothing else is said
LAUNCHER = (sys.executable, "-m", "lightning_sv", "fit")


@dataclass(frozen=True)
class Job:
    """One training run to be had.

    Args:
        name: short name; where the directory bears it too, a hash of the resolved configuration, see `addressed`
        title: what a reader sees, e.g. ``llama, seed 0``
        launcher: the program, e.g. ``python -m lightning_sv fit``
        arguments: everything after it but the run directory
        run_dir: where the run writes
        context: what else decides the result: the corpus, versions; finished runs of another are refused
    """

    name: str
    title: str
    launcher: tuple[str, ...]
    arguments: tuple[str, ...]
    run_dir: Path
    context: Mapping[str, str] = field(default_factory=dict)

    @property
    def addressed(self) -> bool:
        """Whether the configuration names the directory: words of the command and comments of files do not count."""
        return self.run_dir.name == self.name

    @property
    def command(self) -> list[str]:
        """The full command line: it goes on from the run's checkpoint, or begins where there is none."""
        return [*self.launcher, *self.arguments, *self.here]

    @property
    def here(self) -> list[str]:
        """The arguments that follow from the directory."""
        return ["--run_dir", str(self.run_dir), "--ckpt_path", "last"]

    @property
    def log(self) -> Path:
        """Where stdout and stderr of the run go."""
        return self.run_dir / LOG

    def record(self) -> dict[str, Any]:
        """What a finished run is known by: the command without its directory, hashes of files and of own strategies."""
        from lightning_sv.scale.strategy import modules_named  # torch with it: a second, and reading runs needs none

        values = [argument.split("=", 1)[-1] for argument in self.arguments]
        files = {value: _sha256(Path(value)) for value in values if not self.addressed and Path(value).is_file()}
        scales = (value for before, value in pairwise(["", *values]) if before == "--model.scale")
        files |= {name: _sha256(path) for scale in scales for name in modules_named(scale) if (path := _source(name))}
        # the interpreter's path says nothing about the result
        program = ["python" if part == sys.executable else part for part in self.launcher]
        return {"command": [*program, *self.arguments], "files": files, "context": dict(self.context)}

    def prepare(self) -> None:
        """Claim the directory for this command; what another one left unfinished there is removed, see `state`.

        Raises:
            ValueError: the other one still trains there
        """
        if self.state() == "restart":
            remove(self.run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        (self.run_dir / COMMAND).write_text(json.dumps(self.record(), indent=2) + "\n")

    def state(self) -> Literal["new", "resume", "restart", "complete"]:
        """Whether the run is complete, absent, or unfinished: by this command, or by another, which begins again.

        Raises:
            ValueError: the directory holds something that must not be overwritten
        """
        if not self.run_dir.exists() or not any(self.run_dir.iterdir()):
            return "new"
        record = self.run_dir / COMMAND
        if not record.is_file():
            why = f"is not empty and not a run of this comparison (no {COMMAND})"
            raise ValueError(f"{self.run_dir} {why}; choose another output directory.")
        complete = is_complete(self.run_dir)
        try:
            before, now = json.loads(record.read_text()), self.record()
            if self.addressed and isinstance(before, dict):
                before["command"] = now["command"]
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{record} is not valid JSON ({error}); remove {self.run_dir}.") from error
        if not complete and before == now:
            return "resume"
        # an addressed name is a hash of the configuration: the same runs, of which days may lie there
        if not complete and not (self.addressed and (self.run_dir / LAST).parent.is_dir()):
            return "restart"
        if not isinstance(before, dict):
            raise ValueError(f"{record} holds no command; remove {self.run_dir}.")
        if before != now:
            what = "a finished" if complete else "an unfinished"
            change = f"holds {what} run of another command ({_change(before, now)})"
            raise ValueError(f"{self.run_dir} {change}; remove it or choose another output directory.")
        return "complete"


def _source(module: str) -> Path | None:
    """The file of a module that a strategy names; None where it has none."""
    try:
        found = find_spec(module)
    except (ImportError, ValueError):
        return None
    return Path(found.origin) if found is not None and found.has_location and found.origin else None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _change(before: dict[str, Any], now: dict[str, Any]) -> str:
    old, new = before.get("command", []), now["command"]
    if old != new:
        gone = [part for part in old if part not in new] or ["the same words in another order"]
        return f"then {' '.join(gone)}; now {' '.join(p for p in new if p not in old) or 'absent'}"
    before_context = before.get("context", {})
    for key, value in now["context"].items():
        if before_context.get(key) != value:
            return f"{key} was {before_context.get(key)}, now {value}"
    changed = [name for name in now["files"] if before["files"].get(name) != now["files"][name]]
    return f"{', '.join(changed) or 'a file it names'} has changed since"
