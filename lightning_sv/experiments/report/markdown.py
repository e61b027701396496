"""Markdown of a report."""

import re
from collections.abc import Iterable, Mapping, Sequence

import pandas as pd

from lightning_sv.experiments.report.claims import claim_table
from lightning_sv.experiments.report.content import Section, without_empty_columns
from lightning_sv.experiments.results import Figure, runs_of_figures, tokens_per_param_text
from lightning_sv.markdown_text import markdown_text

#: columns of the claims of one figure that the table of all claims lacks
_DETAILS = ["p", "in words"]


def report_title(figures: Sequence[Figure]) -> str:
    """Return the title of a report, that of its figure if it is alone."""
    if len(figures) == 1:
        return figures[0].spec.title
    return "Scale vectors: the paper's figures, regenerated"


def markdown_report(
    figures: Sequence[Figure], sections: Sequence[Sequence[Section]], facts: Mapping[str, str]
) -> str:
    """Return a report as Markdown; texts are escaped.

    Args:
        figures: evaluated figures
        sections: sections of each figure
        facts: name -> value, at the head
    """
    blocks = [f"# {markdown_text(report_title(figures))}", _lines(["", ""], facts.items())]
    claims = pd.concat(map(claim_table, figures)).drop(columns=_DETAILS, errors="ignore")
    claims = without_empty_columns(claims)
    if not claims.empty:
        blocks += ["## Claims", _table(claims)]
    has_title_of_page = len(figures) == 1 and claims.empty
    for figure, own_sections in zip(figures, sections, strict=True):
        if not has_title_of_page:
            blocks.append(f"## {markdown_text(figure.spec.title)}")
        blocks += _figure_blocks(figure, own_sections)
    return "\n\n".join(blocks) + "\n"


def _figure_blocks(figure: Figure, sections: Sequence[Section]) -> list[str]:
    spec = figure.spec
    ours = tokens_per_param_text(runs_of_figures([figure])) or "not stated"
    ratios = f"{ours}; the paper's are {spec.paper_tokens_per_param}"
    about = f"{spec.section}. {spec.summary} Training tokens per parameter: {ratios}."
    blocks = [_paragraph(about)]
    blocks += [f"> **Warning:** {markdown_text(warning)}" for warning in figure.warnings]
    claims = without_empty_columns(claim_table(figure).drop(columns="figure", errors="ignore"))
    if not claims.empty:
        blocks.append(_table(claims))
    if spec.paper:
        blocks.append(_table(pd.DataFrame(spec.paper.items(), columns=["in the paper", ""])))
    for section in sections:
        blocks += _section_blocks(section)
    blocks.append(_code_block(figure.command))
    return blocks


def _section_blocks(section: Section) -> list[str]:
    blocks = [f"### {markdown_text(section.title)}"]
    blocks += [f"![{markdown_text(picture.alt)}]({picture.path})" for picture in section.pictures]
    if len(section.table.columns):
        blocks.append(_table(section.table))
    blocks += [_paragraph(note) for note in section.notes]
    return blocks


def _paragraph(text: str) -> str:
    """Escape a text at the start of a paragraph: a number or a dash does not begin a list."""
    return re.sub(r"^(\d*)([-+=.)])", r"\1\\\2", markdown_text(text))


def _code_block(command: str) -> str:
    """Return a command in a fence that is longer than any of its own."""
    longest = max(map(len, re.findall("`+", command)), default=0)
    fence = "`" * max(3, 1 + longest)
    return f"{fence}sh\n{command}\n{fence}"


def _table(table: pd.DataFrame) -> str:
    return _lines(table.columns, table.to_numpy())


def _lines(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [_line(map(markdown_text, columns)), _line(["---"] * len(columns))]
    lines += [_line(map(markdown_text, row)) for row in rows]
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
