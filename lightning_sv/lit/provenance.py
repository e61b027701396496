"""Where runs and figures come from: commit, date and machine."""

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import lightning_sv


class Provenance(NamedTuple):
    """When and where something was made, and with which code."""

    commit: str
    date: str
    machine: str

    @classmethod
    def now(cls) -> "Provenance":
        """Of this moment, this checkout and this machine."""
        return cls(_commit(), datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), _machine())


def _git(*words: str, at: Path) -> str | None:
    try:
        done = subprocess.run(["git", *words], cwd=at, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _commit() -> str:
    """The commit of the checkout the package is in; its version where it was installed without one."""
    root = Path(lightning_sv.__file__).resolve().parent.parent
    top = _git("rev-parse", "--show-toplevel", at=root)
    commit = _git("rev-parse", "HEAD", at=root)
    # an environment may lie inside somebody else's checkout, whose commit says nothing about this code
    if top is None or commit is None or Path(top).resolve() != root:
        return f"version {lightning_sv.__version__}, not a git checkout"
    changed = _git("status", "--porcelain", "--untracked-files=no", at=root)
    return f"{commit}, with uncommitted changes" if changed else commit


def _machine() -> str:
    parts = [_cpu(), f"{os.cpu_count()} cores", f"torch {version('torch')}", f"Python {platform.python_version()}"]
    torch = sys.modules.get("torch")  # a second to import; what has not has used no GPU
    if torch is not None and torch.cuda.is_available():
        parts.insert(2, f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
    return ", ".join(parts)


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
