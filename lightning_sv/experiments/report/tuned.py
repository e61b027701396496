"""Optima of the figure `tuning` as files of tuned settings: out/tuned/MODEL-STEPS.yaml."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import yaml

from lightning_sv.atomic import write_atomically
from lightning_sv.experiments.arms import runs_of
from lightning_sv.experiments.kinds.base import LoadedPanel
from lightning_sv.experiments.results import Figure, panels_of
from lightning_sv.experiments.spec import Tuned, rounded

#: figure of conf/paper whose optima other figures use
TUNING = "tuning"


def write_tuned(figures: Sequence[Figure], out: Path) -> None:
    """Write the optima of the figure `tuning`; other grids answer questions of their own.

    If two grids have the same model and steps, the first is written.
    """
    found: dict[str, Tuned] = {}
    tuning = [figure for figure in figures if figure.spec.name == TUNING]
    for figure, panel in panels_of(tuning):
        if panel.arms:
            tuned = _tuned(figure, panel)
            found.setdefault(tuned.name, tuned)
    for name, tuned in found.items():
        content = asdict(tuned)
        del content["name"]  # that of the file
        del content["same_as"]  # a choice of the author, and not of a grid
        text = yaml.safe_dump(content, sort_keys=False, width=math.inf)
        write_atomically(out / "tuned" / f"{name}.yaml", text)


def _tuned(figure: Figure, panel: LoadedPanel) -> Tuned:
    first = panel.arms[0].run_spec
    assert first is not None  # the arms are planned
    arms = {}
    source = _source(figure, panel)
    for series in panel.series:
        run_spec = series.arms[0].run_spec
        assert run_spec is not None
        best = series.optimum
        values = map(rounded, best.values)
        arms[run_spec.strategy] = dict(zip(panel.spec.axes, values, strict=True))
        if best.why_not:
            source += f"; {run_spec.strategy} is its lowest point: {best.why_not}"
    return Tuned(
        name=f"{first.model}-{first.steps}",
        source=source,
        optim=panel.spec.optim,
        schedule=panel.spec.schedule,
        d_model=first.settings["model"]["backbone"]["d_model"],
        arms=arms,
    )


def _source(figure: Figure, panel: LoadedPanel) -> str:
    """Return the command, the seeds and the commits of a grid."""
    seeds = ", ".join(map(str, panel.arms[0].seeds))
    commits = {str(run.summary.get("commit"))[:10] for run in runs_of(panel.arms)}
    return f"{figure.command}; seeds {seeds}, commit {', '.join(sorted(commits))}"
