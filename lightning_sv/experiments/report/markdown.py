"""Markdown of a report."""

import re
from collections.abc import Iterable, Mapping, Sequence

import pandas as pd

from lightning_sv.experiments.report.content import Content, FigureContent, Section
from lightning_sv.markdown_text import markdown_text


def markdown_report(content: Content) -> str:
    """Return the report as Markdown; texts are escaped."""
    blocks = [f"# {markdown_text(content.title)}", _facts(content.facts)]
    if not content.claims.empty:
        blocks += ["## Claims", _table(content.claims)]
    for figure in content.figures:
        has_title_of_page = figure.title == content.title and content.claims.empty
        if not has_title_of_page:
            blocks.append(f"## {markdown_text(figure.title)}")
        blocks += _figure_blocks(figure)
    return "\n\n".join(blocks) + "\n"


def _figure_blocks(figure: FigureContent) -> list[str]:
    blocks = [_paragraph(figure.about)]
    blocks += [f"> **Warning:** {markdown_text(warning)}" for warning in figure.warnings]
    if not figure.claims.empty:
        blocks.append(_table(figure.claims))
    if figure.paper:
        blocks.append(_table(pd.DataFrame(figure.paper.items(), columns=["in the paper", ""])))
    for section in figure.sections:
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


def _facts(facts: Mapping[str, str]) -> str:
    return _lines(["", ""], facts.items())


def _table(table: pd.DataFrame) -> str:
    return _lines(table.columns, table.to_numpy())


def _lines(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [_line(map(markdown_text, columns)), _line(["---"] * len(columns))]
    lines += [_line(map(markdown_text, row)) for row in rows]
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
