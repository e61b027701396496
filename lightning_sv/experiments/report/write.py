"""Reports of figures: an HTML page, Markdown, pictures, and CSV files."""

import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from lightning_sv.atomic import write_atomically
from lightning_sv.errors import NotTestableError
from lightning_sv.experiments.kinds.base import Drawing, LoadedPanel
from lightning_sv.experiments.report import copying
from lightning_sv.experiments.report.claims import verdict_frame
from lightning_sv.experiments.report.content import (
    Picture,
    Section,
    head_facts,
    without_empty_columns,
)
from lightning_sv.experiments.report.differences import difference_frame
from lightning_sv.experiments.report.folder import HTML, MARKDOWN
from lightning_sv.experiments.report.markdown import markdown_report, report_title
from lightning_sv.experiments.report.page import html_page
from lightning_sv.experiments.report.plot import Plot
from lightning_sv.experiments.report.results_csv import RESULTS, run_frame, write_csv
from lightning_sv.experiments.report.scalar_plots import copying_plot
from lightning_sv.experiments.report.tuned import write_tuned
from lightning_sv.experiments.results import Figure
from lightning_sv.plots.style import plain_style
from lightning_sv.runs.provenance import Provenance


@plain_style
def write_report(figures: Sequence[Figure], out: Path, what: str, caution: str = "") -> None:
    """Write a report into a directory.

        report.html, report.md   pages; the first one is self-contained
        figures/*.png, *.svg     pictures of the pages
        results.csv              one row per run
        differences.csv          one row per difference to a baseline
        verdicts.csv             one row per claim
        tuned/MODEL-STEPS.yaml   optima of the figure `tuning`

    Args:
        figures: evaluated figures with different names
        out: directory of the report
        what: description of the experiments, e.g. the budget of `paper` and its summary
        caution: warning about all figures
    """
    assert figures and len({figure.spec.name for figure in figures}) == len(figures)
    sections = [_figure_sections(figure, out) for figure in figures]
    facts = head_facts(figures, what, Provenance.now(), caution)
    markdown = markdown_report(figures, sections, facts)
    write_csv(out / RESULTS, run_frame(figures, out))  # first: it shows that a folder is a report
    write_atomically(out / MARKDOWN, markdown)
    write_atomically(out / HTML, html_page(report_title(figures), markdown, out))
    write_tuned(figures, out)
    write_csv(out / "differences.csv", difference_frame(figures))
    write_csv(out / "verdicts.csv", verdict_frame(figures))


def _figure_sections(figure: Figure, out: Path) -> list[Section]:
    """Draw the pictures of a figure, and return its sections."""
    name = re.sub(r"[^\w.+=-]+", "-", figure.spec.name)
    sections = []
    for number, panel in enumerate(figure.panels, 1):
        sections += _panel_sections(panel, out, f"figures/{name}-{number}")
    return sections


def _panel_sections(panel: LoadedPanel, out: Path, stem: str) -> list[Section]:
    if panel.why_not is not None:
        return [Section(panel.title, notes=[f"Not testable here: {panel.why_not}."])]
    table = pd.DataFrame()
    try:
        table = without_empty_columns(panel.kind.table(panel))
        drawing = panel.kind.draw(panel)
    except NotTestableError as error:  # the other panels are still drawn
        drawing = Drawing(notes=[f"This panel cannot be drawn: {error}"])
    pictures = _saved(drawing.plots, out, stem)
    sections = [Section(panel.title, pictures, table, [*drawing.notes, *panel.notes])]
    if panel.kind.shows_copying and copying.measured_copying(panel.arms):
        sections.append(_copying_section(panel, out, stem))
    return sections


def _copying_section(panel: LoadedPanel, out: Path, stem: str) -> Section:
    """Return plot and table of copying, which all runs measured."""
    pictures = _saved([copying_plot(panel)], out, stem)
    table = without_empty_columns(copying.copying_table(panel))
    return Section(f"{panel.title}: copying from the context", pictures, table, [copying.NOTE])


def _saved(plots: Sequence[Plot], out: Path, stem: str) -> list[Picture]:
    """Write pictures; return their paths relative to the report, with alternative texts."""
    for plot in plots:
        plot.save(out / f"{stem}-{plot.name}")
    return [Picture(f"{stem}-{plot.name}.png", plot.alt) for plot in plots]
