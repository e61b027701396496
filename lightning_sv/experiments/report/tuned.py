"""Optima of grids as files of tuned settings: out/tuned/MODEL-STEPS.yaml."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_sv.atomic import write_atomically
from lightning_sv.experiments.arms import runs_of
from lightning_sv.experiments.kinds.base import LoadedPanel
from lightning_sv.experiments.results import Figure, panels_of
from lightning_sv.experiments.spec import rounded
from lightning_sv.statistics.optimum import Optimum

if TYPE_CHECKING:  # it imports torch, which a report does not need
    from lightning_sv.experiments.run_spec import RunSpec


def write_tuned(figures: Sequence[Figure], out: Path) -> None:
    """Write the optima of grids with their errors.

    If two grids have the same model and steps, that of the figure `tuning` is written, else the
    first; if two arms of a grid have the same strategy, the arm with the lower loss.
    """
    texts: dict[Path, str] = {}
    tuning_first = sorted(figures, key=lambda figure: figure.spec.name != "tuning")
    for figure, panel in panels_of(tuning_first):
        if not panel.spec.axes or not panel.arms:
            continue
        run_spec = panel.arms[0].run_spec
        if run_spec is not None:
            path = out / "tuned" / f"{run_spec.model}-{run_spec.steps}.yaml"
            texts.setdefault(path, _tuned_text(figure, panel, run_spec))
    for path, text in texts.items():
        write_atomically(path, text)


def _tuned_text(figure: Figure, panel: LoadedPanel, run_spec: "RunSpec") -> str:
    spec = panel.spec
    width = json.loads(run_spec.identity)["model"]["backbone"]["d_model"]
    lines = [
        f"source: {json.dumps(_source(figure, panel))}",
        f"optim: {spec.optim}",
        f"schedule: {spec.schedule}",
        f"d_model: {width}",
        "arms:",
    ]
    for strategy, best in _best_of_strategies(panel).items():
        lines += _arm_lines(strategy, best, list(spec.axes))
    return "\n".join(lines) + "\n"


def _source(figure: Figure, panel: LoadedPanel) -> str:
    """Return the command, the seeds and the commits of a grid."""
    seeds = panel.arms[0].seeds
    seeds_text = f"seeds {seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"seed {seeds[0]}"
    commits = {str(run.summary.get("commit"))[:10] for run in runs_of(panel.arms)}
    return f"{figure.command}; {seeds_text}, commit {', '.join(sorted(commits))}"


def _best_of_strategies(panel: LoadedPanel) -> dict[str, Optimum]:
    """Return strategy -> optimum, the lower one of two arms."""
    best: dict[str, Optimum] = {}
    for series in panel.series:
        run_spec = series.arms[0].run_spec
        assert run_spec is not None
        optimum = series.optimum
        other = best.setdefault(run_spec.strategy, optimum)
        best[run_spec.strategy] = min(other, optimum, key=lambda optimum: optimum.loss)
    return best


def _arm_lines(strategy: str, best: Optimum, axes: Sequence[str]) -> list[str]:
    error = "too few runs for a standard error"
    if best.se > 0:
        error = f"standard error {best.se:.4f}"
    comment = best.why_not or f"{best.loss:.4f} nats per token, {error}"
    lines = [f"  # {comment}", f"  {json.dumps(strategy)}:"]
    for key, value, log_error in zip(axes, best.values, best.errors, strict=True):
        line = f"    {key}: {rounded(value):g}"
        if log_error > 0:
            line += f"  # times or over {math.exp(log_error):.2f}"
        lines.append(line)
    return lines
