"""Stages of the runner's test, which run in processes of their own."""

import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.process import Task


def good(task: Task) -> dict[str, Any]:
    return {"seven": 7, "known": task.options["peak_tflops"]}


def bad(task: Task) -> dict[str, Any]:
    task.save({"so_far": 1})
    raise RuntimeError("the card fell out")


def endless(task: Task) -> dict[str, Any]:
    task.save({"so_far": 2})
    time.sleep(600)
    return {}


def late(task: Task) -> dict[str, Any]:
    """Reach the deadline in the first call, and end in the second."""
    mark = Path(task.work) / "began"
    if mark.exists():
        return {"seven": 7}
    mark.touch()
    time.sleep(600)
    return {}
