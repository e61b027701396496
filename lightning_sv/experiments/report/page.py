"""A report as one HTML page that needs nothing else, and as Markdown beside its pictures."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from lightning_sv.experiments.judge import NOT_TESTABLE
from lightning_sv.experiments.report.tables import PAPER_TOKENS_PER_PARAM, ours_words, panel_table, tokens_per_param
from lightning_sv.experiments.results import FigureResult
from lightning_sv.runs.events import Run
from lightning_sv.runs.provenance import Provenance

OURS = "ours, nats per token unless said"
_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; margin: 0 auto; padding: 1rem;
  max-width: 80rem; }
h1, h2, h3 { line-height: 1.2; } h2 { border-top: 2px solid #ddd; padding-top: 1.5rem; margin-top: 2.5rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; margin: .5rem 0 1rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .7rem .3rem 0; border-bottom: 1px solid #ddd;
  min-width: 4rem; } td:last-child { overflow-wrap: anywhere; min-width: 7rem; }
.views { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 1rem; }
.views img { width: 100%; height: auto; max-width: 36rem; }
pre { background: #f4f4f4; padding: .6rem; overflow-x: auto; }
.warning { border-left: 4px solid #D55E00; background: #fdf3ec; padding: .5rem .8rem; margin: .4rem 0; }
.note { color: #555; font-size: .9rem; } .verdict { font-weight: 600; }
"""


class PanelPages(NamedTuple):
    """A panel's pictures, as (path below the report without its suffix, words), and the sentences under them."""

    pictures: list[tuple[str, str]]
    notes: list[str]


Drawn = Mapping[tuple[str, int], PanelPages]


def head_lines(
    figures: Sequence[FigureResult], scale: str, made: Provenance, caution: str = ""
) -> list[tuple[str, str]]:
    """What stands above everything: (what, its value)."""
    runs = _runs(figures)
    budgets = sorted(x for run in runs if (x := tokens_per_param(run)) is not None)
    words = " to ".join(dict.fromkeys(f"{x:.3g}" for x in (budgets[0], budgets[-1]))) if budgets else "not stated"
    judged = sum(v.verdict != NOT_TESTABLE for figure in figures for v in figure.verdicts)
    by_chance = (
        f"{judged} are judged by intervals of 95%, none corrected for their number (only a part of a claim "
        f"that speaks against it is, for the number of its parts): were no two arms different, about "
        f"{max(1, round(0.05 * judged))} would still come out resolved. Claims that share runs are not independent."
    )
    return [
        ("scale", scale),
        *([("read with it", caution)] if caution else []),
        *([("claims", by_chance)] if judged > 1 else []),
        ("training tokens per parameter", f"{words} (the paper's are {PAPER_TOKENS_PER_PARAM})"),
        *((f"{key} of the runs", _stated(runs, key)) for key in ("commit", "machine", "torch")),
        ("runs", f"{len({run.dir for run in runs})}, finished {_dates(runs)}"),
        ("report written", f"{made.date}, at commit {made.commit}, on {made.machine}"),
    ]


def _runs(figures: Sequence[FigureResult]) -> list[Run]:
    return [run for figure in figures for panel in figure.panels for arm in panel.arms for run in arm.runs]


def _stated(runs: Sequence[Run], key: str) -> str:
    return ", ".join(sorted({str(run.summary[key]) for run in runs if run.summary.get(key)})) or "not stated"


def _dates(runs: Sequence[Run]) -> str:
    dates = sorted(run.summary["date"] for run in runs if run.summary.get("date"))
    return f"from {dates[0]} to {dates[-1]}" if dates else "at a time that they do not state"


def _claims(figure: FigureResult) -> list[list[str]]:
    return [[figure.claim(v), v.verdict, v.sentence, ours_words(v), v.paper or "not stated"] for v in figure.verdicts]


def html_page(figures: Sequence[FigureResult], drawn: Drawn, head: list[tuple[str, str]], out: Path) -> str:
    """The whole page; pictures are read from below ``out`` and set into it."""
    parts = [
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(figures_title(figures))}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{_STYLE}</style></head><body>\n<h1>{escape(figures_title(figures))}</h1>",
        _html_table([], head),
    ]
    summary = [[f.title, c[0], c[1], c[3], c[4]] for f in figures for c in _claims(f)]
    if summary:
        parts += ["<h2>Claims</h2>", _html_table(["figure", "claim", "verdict", OURS, "the paper's"], summary, 2)]
    for figure in figures:
        parts.append(f'<h2 id="{escape(figure.name)}">{escape(figure.title)}</h2>')
        parts.append(f"<p>{escape(_about(figure))}</p>")
        parts += [f'<p class="warning"><strong>Warning:</strong> {escape(w)}</p>' for w in figure.warnings]
        if figure.verdicts:
            claims = ["claim", "verdict", "in words", OURS, "the paper's"]
            parts.append(_html_table(claims, _claims(figure), 1))
        if figure.paper_numbers:
            parts.append(_html_table(["in the paper", ""], figure.paper_numbers))
        for i, panel in enumerate(figure.panels):
            pages = drawn[figure.name, i]
            parts.append(f"<h3>{escape(panel.title)}</h3>")
            images = [_html_image(out / f"{stem}.svg", alt) for stem, alt in pages.pictures]
            parts += [f'<div class="views">{"".join(images)}</div>'] if images else []
            columns, rows = panel_table(panel)
            parts += [_html_table(columns, rows)] if columns else []
            parts += [f'<p class="note">{escape(note)}</p>' for note in (*pages.notes, *panel.notes)]
        parts.append(f"<pre>{escape(figure.command)}</pre>")
    return "\n".join([*parts, "</body></html>", ""])


def _about(figure: FigureResult) -> str:
    budget = f"{figure.tokens_per_param:.3g}" if figure.tokens_per_param > 0 else "not stated"
    return (
        f"{figure.section}. {figure.summary} Training tokens per parameter: {budget}; "
        f"the paper's are {figure.paper_tokens_per_param}."
    )


def figures_title(figures: Sequence[FigureResult]) -> str:
    """The heading of a report: of its only figure, or of the paper's."""
    return figures[0].title if len(figures) == 1 else "Scale vectors: the paper's figures, regenerated"


def _html_image(path: Path, alt: str) -> str:
    # as an image rather than as elements: the ids of one picture's clips and glyphs would meet another's
    data = b64encode(path.read_bytes()).decode()
    return f'<img alt="{escape(alt)}" src="data:image/svg+xml;base64,{data}">'


def _html_table(columns: Sequence[str], rows: Sequence[Sequence[str]], verdict: int | None = None) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = []
    for row in rows:
        marks = [' class="verdict"' if i == verdict else "" for i in range(len(row))]
        body.append("".join(f"<td{mark}>{escape(cell)}</td>" for mark, cell in zip(marks, row, strict=True)))
    lines = "".join(f"<tr>{line}</tr>" for line in ([head] if columns else []) + body)
    return f'<div class="wide"><table>{lines}</table></div>'


def markdown_page(figures: Sequence[FigureResult], drawn: Drawn, head: list[tuple[str, str]]) -> str:
    """The same in Markdown, with the pictures as links relative to the report."""
    parts = [f"# {_md(figures_title(figures))}", _md_table(["", ""], head)]
    summary = [[f.title, c[0], c[1], c[3], c[4]] for f in figures for c in _claims(f)]
    if summary:
        parts += ["## Claims", _md_table(["figure", "claim", "verdict", OURS, "the paper's"], summary)]
    for figure in figures:
        parts += [f"## {_md(figure.title)}", _md(_about(figure))]
        parts += [f"> **Warning:** {_md(warning)}" for warning in figure.warnings]
        if figure.verdicts:
            parts.append(_md_table(["claim", "verdict", "in words", OURS, "the paper's"], _claims(figure)))
        if figure.paper_numbers:
            parts.append(_md_table(["in the paper", ""], figure.paper_numbers))
        for i, panel in enumerate(figure.panels):
            pages = drawn[figure.name, i]
            parts.append(f"### {_md(panel.title)}")
            parts += [f"![{_md(alt)}]({stem}.png)" for stem, alt in pages.pictures]
            columns, rows = panel_table(panel)
            parts += [_md_table(columns, rows)] if columns else []
            parts += [_md(note) for note in (*pages.notes, *panel.notes)]
        parts.append(f"```sh\n{figure.command}\n```")
    return "\n\n".join(parts) + "\n"


def _md(text: str) -> str:
    plain = " ".join(escape(text, quote=False).split())
    return "".join(f"\\{c}" if c in "\\|*_[]`" else c for c in plain)


def _md_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *([_md(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
