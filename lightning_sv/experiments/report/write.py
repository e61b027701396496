"""Reports of figures: an HTML page, Markdown, pictures, and CSV files."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

from lightning_sv.atomic import write_atomically
from lightning_sv.errors import NotTestableError
from lightning_sv.experiments.kinds.base import Drawing, LoadedPanel
from lightning_sv.experiments.report import plots, tables
from lightning_sv.experiments.report.copying import copying_table, measured
from lightning_sv.experiments.report.markdown import Section, head_lines, markdown_report
from lightning_sv.experiments.report.page import html_page
from lightning_sv.experiments.report.plot import Plot
from lightning_sv.experiments.results import Figure
from lightning_sv.experiments.spec import rounded
from lightning_sv.plots.gamma_plot import gamma_maps
from lightning_sv.plots.style import plain_style
from lightning_sv.runs.provenance import Provenance
from lightning_sv.runs.results_csv import RESULTS
from lightning_sv.statistics.optimum import Optimum

COPYING_NOTE = (
    "Final loss in nats per token of tokens that repeat a pair of their context, of those seen in it otherwise, and of "
    "the rest; mean of the seeds. The parts of a difference are share times difference of a kind. They add up to the "
    "difference on the measured sequences. The circuit counts as formed when a text is predicted better by 0.5 nats "
    "per token on its second reading; one time per seed."
)

STEPS_NOTE = (
    "Mean over training and seeds. A step is clipped if the norm of its gradient is above gradient_clip_val. A "
    "relative step is ‖change‖ / ‖value‖ of all parameters of a role, with weight decay. results.csv also has the "
    "relative steps of each branch, if they were measured."
)
GAMMA_NOTE = (
    "Root mean square of the entries of γ, by layer and training tokens. White is 1, the value at the start of "
    "training. Branches with equal values share a panel."
)


@plain_style
def write_report(figures: Sequence[Figure], out: Path, what: str, caution: str = "") -> None:
    """Write a report into a directory.

        out/  report.html  report.md  figures/*.png *.svg  results.csv  differences.csv  verdicts.csv
        and tuned/MODEL-STEPS.yaml for grids

    `report.html` is self-contained. `results.csv` has one row per run, `differences.csv` per difference to a baseline,
    and `verdicts.csv` per claim. `what` describes the experiments, e.g. the budget of `paper` and its summary;
    `caution` is a warning about all figures.
    """
    assert figures and len({figure.spec.name for figure in figures}) == len(figures)
    panels = []
    for figure in figures:
        stem = "figures/" + re.sub(r"[^\w.+=-]+", "-", figure.spec.name)
        panels.append([s for i, panel in enumerate(figure.panels, 1) for s in _sections(panel, out, f"{stem}-{i}")])
    text = markdown_report(figures, panels, head_lines(figures, what, Provenance.now(), caution))
    for name, page in zip(tables.PAGES, (text, html_page(text, out)), strict=True):
        write_atomically(out / name, page)
    write_tuned(figures, out)
    tables.write_csv(out / RESULTS, tables.run_rows(figures, out))
    tables.write_csv(out / "differences.csv", tables.difference_rows(figures))
    tables.write_csv(out / "verdicts.csv", tables.verdict_rows(figures))


def _sections(panel: LoadedPanel, out: Path, stem: str) -> list[Section]:
    if panel.why_not is not None:
        return [Section(panel.title, [], [], [], [f"Not testable here: {panel.why_not}."])]
    try:
        drawing = panel.kind.draw(panel)
    except NotTestableError as error:  # the other panels are still drawn
        drawing = Drawing(notes=[f"This panel cannot be drawn: {error}"])
    pictures = _saved(drawing.plots, out, stem)
    sections = [Section(panel.title, pictures, *panel.kind.table(panel), (*drawing.notes, *panel.notes))]
    if panel.kind.shows_training and measured(panel.arms):
        pictures = _saved([plots.copying_plot(panel)], out, stem)
        title = f"{panel.title}: copying from the context"
        sections.append(Section(title, pictures, *copying_table(panel), [COPYING_NOTE]))
    if panel.kind.shows_training:
        sections += _steps_section(panel) + _gamma_section(panel, out, stem)
    return sections


def _steps_section(panel: LoadedPanel) -> list[Section]:
    """Return the table of clipped and relative steps, if runs measured them."""
    columns, rows = tables.steps_table(panel)
    if not columns:
        return []
    return [Section(f"{panel.title}: size of the steps", [], columns, rows, [STEPS_NOTE])]


def _gamma_section(panel: LoadedPanel, out: Path, stem: str) -> list[Section]:
    """Return the picture of gamma by layer, if the panel is of one run that logged it."""
    runs = [run for arm in panel.arms for run in arm.runs]
    if len(runs) != 1 or not gamma_maps(runs[0]):
        return []
    pictures = _saved([plots.gamma_plot(runs[0])], out, stem)
    return [Section("Scale vectors by layer", pictures, [], [], [GAMMA_NOTE])]


def _saved(drawn: Sequence[Plot], out: Path, stem: str) -> list[tuple[str, str]]:
    """Write pictures; return their paths relative to the report, with alternative texts."""
    for plot in drawn:
        plot.save(out / f"{stem}-{plot.name}")
    return [(f"{stem}-{plot.name}.png", plot.alt) for plot in drawn]


def write_tuned(figures: Sequence[Figure], out: Path) -> None:
    """Write the optima of grids with their errors to out/tuned/MODEL-STEPS.yaml.

    If two grids have the same model and steps, that of the figure `tuning` is written, else the first; if two arms of a
    grid have the same strategy, the arm with the lower loss.
    """
    texts: dict[Path, str] = {}
    for figure in sorted(figures, key=lambda figure: figure.spec.name != "tuning"):
        for panel in figure.panels:
            if panel.kind.has_optima and panel.arms and (run_spec := panel.arms[0].run_spec):
                path = out / "tuned" / f"{run_spec.model}-{run_spec.steps}.yaml"
                texts.setdefault(path, _tuned_text(figure, panel))
    for path, text in texts.items():
        write_atomically(path, text)


def _tuned_text(figure: Figure, panel: LoadedPanel) -> str:
    first, spec = panel.arms[0], panel.spec
    assert first.run_spec is not None
    commits = ", ".join(sorted({str(run.summary.get("commit"))[:10] for arm in panel.arms for run in arm.runs}))
    seeds = f"seeds {first.seeds[0]} to {first.seeds[-1]}" if len(first.seeds) > 1 else f"seed {first.seeds[0]}"
    width = json.loads(first.run_spec.identity)["model"]["backbone"]["d_model"]
    lines = [f"source: {json.dumps(f'{figure.command}; {seeds}, commit {commits}')}"]
    lines += [f"optim: {spec.optim}", f"schedule: {spec.schedule}", f"d_model: {width}", "arms:"]
    found: dict[str, Optimum] = {}
    for series in panel.series:
        best, run_spec = series.optimum, series.arms[0].run_spec
        assert run_spec is not None
        if run_spec.strategy not in found or best.loss < found[run_spec.strategy].loss:
            found[run_spec.strategy] = best
    for strategy, best in found.items():
        error = f"standard error {best.se:.4f}" if best.se else "too few runs for a standard error"
        lines.append(f"  # {best.why_not or f'{best.loss:.4f} nats per token, {error}'}")
        lines.append(f"  {json.dumps(strategy)}:")
        for key, value, off in zip(spec.axes, best.values, best.errors, strict=True):
            comment = f"  # times or over {math.exp(off):.2f}" if off > 0 else ""
            lines.append(f"    {key}: {rounded(value):g}{comment}")
    return "\n".join(lines) + "\n"
