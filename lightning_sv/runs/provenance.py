"""Provenance of runs and figures: commit, date, machine, and the segments of resumed runs."""

import os
import platform
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from lightning_sv.errors import ConfigError
from lightning_sv.version import __version__

_T = TypeVar("_T")


class Provenance(NamedTuple):
    """Commit, date and machine of a result."""

    commit: str
    date: str
    machine: str

    @classmethod
    def now(cls) -> "Provenance":
        """Return those of this process."""
        return cls(commit(), datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), _machine())


class Segments:
    """Segments of a run, each from a start of the program to the checkpoint where the next resumes.

    A segment has "steps", its optimizer steps; "max_steps", the length of its schedule; "seconds",
    its time; and "numerics", the settings that change the numbers of a resumed run. The steps add
    up to those of the run; steps lost by a kill do not count.
    """

    def __init__(self) -> None:
        self._before: list[dict[str, Any]] = []
        self._began = time.perf_counter()

    def at(self, step: int, max_steps: int, numerics: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return all segments, including the current one.

        Args:
            step: optimizer steps of the run
            max_steps: trainer.max_steps
            numerics: setting -> value, for settings that a resumed run may change although its
                numbers depend on them
        """
        current = {
            "steps": step - sum(segment["steps"] for segment in self._before),
            "max_steps": max_steps,
            "seconds": time.perf_counter() - self._began,
            "numerics": dict(numerics),
        }
        return [*self._before, current]

    @property
    def length(self) -> int | None:
        """trainer.max_steps of the previous segment, if any."""
        return self._before[-1]["max_steps"] if self._before else None

    def restore(self, saved: Any) -> None:
        """Continue after the segments of a checkpoint, unless they are damaged."""
        try:
            self._before = [_read_segment(segment) for segment in saved]
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            found = f"the checkpoint's entry 'legs' is damaged ({error!r})"
            raise ConfigError(f"{found}; use a different one.") from error


def _read_segment(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a segment of a checkpoint; those of earlier versions have no numerics."""
    numerics = dict(saved.get("numerics", {}))
    return {
        "steps": int(saved["steps"]),
        "max_steps": int(saved["max_steps"]),
        "seconds": float(saved["seconds"]),
        "numerics": {str(setting): str(value) for setting, value in numerics.items()},
    }


def changed_numerics(summary: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return setting -> its different values, in order, for settings that a resume changed."""
    values: dict[str, list[str]] = defaultdict(list)
    for segment in _segments_of(summary):
        numerics = segment.get("numerics") or {}
        for setting, value in numerics.items():
            values[setting].append(value)
    different = {setting: _different(each) for setting, each in values.items()}
    return {setting: each for setting, each in different.items() if each}


def schedule_lengths(summary: Mapping[str, Any]) -> list[int]:
    """Return the different trainer.max_steps of a run's segments, empty if there is only one."""
    lengths = [segment.get("max_steps") for segment in _segments_of(summary)]
    return _different(length for length in lengths if isinstance(length, int))


def _different(values: Iterable[_T]) -> list[_T]:
    """Return the different values, in order; none if all are equal."""
    different: list[_T] = []
    for value in values:
        if value not in different:
            different.append(value)
    return different if len(different) > 1 else []


def _segments_of(summary: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the segments in a summary, except damaged ones."""
    for segment in summary.get("legs") or []:
        if isinstance(segment, dict):
            yield segment


def _git(*words: str, at: Path) -> str | None:
    try:
        done = subprocess.run(
            ["git", *words], cwd=at, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


@cache
def commit() -> str:
    """Return the commit of the package's checkout at the first call.

    Without a checkout, return the version of the package.
    """
    return commit_of(Path(__file__).resolve().parents[2])


def commit_of(root: Path) -> str:
    """Return the commit of the checkout in a folder, or why there is none with our version."""
    answer = _git("rev-parse", "--show-toplevel", "HEAD", at=root)
    if answer is None:
        if (root / ".git").exists():  # git is missing, or the checkout has another owner
            return f"version {__version__}, of a checkout that git does not read"
        return f"version {__version__}, not a git checkout"
    top, _, head = answer.partition("\n")
    if Path(top).resolve() != root:  # an environment inside the checkout of a different project
        return f"version {__version__}, not a git checkout"
    code = ("--", ".", ":(exclude)results")  # recordings are not code
    changed = _git("status", "--porcelain", "--untracked-files=no", *code, at=root)
    return f"{head}, with uncommitted changes" if changed else head


def _machine() -> str:
    """Return processor, cores, GPUs and versions."""
    parts = [_processor(), f"{os.cpu_count()} cores"]
    torch = sys.modules.get("torch")  # importing it takes a second, and without it no GPU was used
    if torch is not None and torch.cuda.is_available():
        parts.append(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
    parts += [f"torch {version('torch')}", f"Python {platform.python_version()}"]
    return ", ".join(parts)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.is_file() else ""
    name = re.search(r"^model name\s*:(.*)$", text, re.MULTILINE)
    if name is not None:
        return name[1].strip()
    return platform.processor() or platform.machine()
