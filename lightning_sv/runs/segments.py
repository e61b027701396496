"""Segments of a run: one per start of the program, which resumes where the one before left off."""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_sv.errors import ConfigError


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
            if value not in values[setting]:
                values[setting].append(value)
    return {setting: each for setting, each in values.items() if len(each) > 1}


def schedule_lengths(summary: Mapping[str, Any]) -> list[int]:
    """Return the different trainer.max_steps of a run's segments, empty if there is only one."""
    lengths: list[int] = []
    for segment in _segments_of(summary):
        length = segment.get("max_steps")
        if isinstance(length, int) and length not in lengths:
            lengths.append(length)
    if len(lengths) == 1:
        return []
    return lengths


def _segments_of(summary: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the segments in a summary, except damaged ones."""
    for segment in summary.get("legs") or []:
        if isinstance(segment, dict):
            yield segment
