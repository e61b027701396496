"""Provenance of runs and figures: commit, date and machine."""

import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from lightning_sv.version import __version__


class Provenance(NamedTuple):
    """Commit, date and machine of a result."""

    commit: str
    date: str
    machine: str

    @classmethod
    def now(cls) -> "Provenance":
        """Return those of this process."""
        return cls(commit(), datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), _machine())


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
    if info.is_file():
        name = re.search(r"^model name\s*:(.*)$", info.read_text(), re.MULTILINE)
        if name is not None:
            return name[1].strip()
    return platform.processor() or platform.machine()
