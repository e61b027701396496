"""The optima of a report's grids as files for conf/paper/tuned, each with its error and where it is from."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_sv.analysis.optimum import Optimum
from lightning_sv.atomic import atomic_path
from lightning_sv.experiments.results import Figure, Panel
from lightning_sv.experiments.sources.from_yaml import rounded

if TYPE_CHECKING:  # torch with it, and a report needs none
    from lightning_sv.experiments.run_spec import RunSpec


def write_tuned(figures: Sequence[Figure], out: Path) -> None:
    """Write the optima of the grids among the panels to `out`/tuned, with their errors: a file a model and length.

    Of two grids of one model and length the one of the figure `tuning` counts, and else the first; of two arms of one
    strategy in it the lower one.
    """
    written: set[Path] = set()
    for figure in sorted(figures, key=lambda figure: figure.spec.name != "tuning"):
        for panel in figure.panels:
            run_spec = panel.arms[0].run_spec if panel.arms else None
            if panel.kind == "grid" and run_spec is not None:
                path = out / "tuned" / f"{run_spec.model}-{run_spec.steps}.yaml"
                if path not in written:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with atomic_path(path) as partial:
                        partial.write_text(_text(figure, panel, run_spec), encoding="utf-8")
                    written.add(path)


def _text(figure: Figure, panel: Panel, run_spec: "RunSpec") -> str:
    arms, runs = panel.arms, [run for arm in panel.arms for run in arm.runs]
    commits = ", ".join(sorted({str(run.summary.get("commit"))[:10] for run in runs}))
    seeds = f"seeds {arms[0].seeds[0]} to {arms[0].seeds[-1]}" if len(arms[0].seeds) > 1 else f"seed {arms[0].seeds[0]}"
    spec = panel.spec
    width = json.loads(run_spec.identity)["model"]["backbone"]["d_model"]
    lines = [f"source: {json.dumps(f'{figure.command}; {seeds}, commit {commits}')}"]
    lines += [f"optim: {spec.optim}", f"schedule: {spec.schedule}", f"d_model: {width}", "arms:"]
    found: dict[str, Optimum] = {}
    for series in panel.series:
        best, of = panel.optimum(series), panel.arm(series.arms[0]).run_spec
        assert of is not None
        if of.strategy not in found or best.loss < found[of.strategy].loss:
            found[of.strategy] = best
    for strategy, best in found.items():
        error = f"standard error {best.se:.4f}" if best.se else "too few runs for a standard error"
        lines.append(f"  # {best.why_not or f'{best.loss:.4f} nats per token, {error}'}")
        lines.append(f"  {json.dumps(strategy)}:")
        for key, value, off in zip(panel.spec.axes, best.values, best.errors, strict=True):
            lines.append(
                f"    {key}: {rounded(value):g}" + (f"  # times or over {math.exp(off):.2f}" if off > 0 else "")
            )
    return "\n".join(lines) + "\n"
