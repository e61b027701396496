"""HTML page of a report: its Markdown in a frame, self-contained and without scripts."""

from base64 import b64encode
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import get_args
from urllib.parse import unquote

from markdown_it import MarkdownIt
from markdown_it.token import Token

from lightning_sv.statistics.verdicts import VerdictWord

_STYLE = Path(__file__).with_name("page.css")
_VERDICTS: tuple[str, ...] = get_args(VerdictWord)


def html_page(title: str, markdown: str, root: Path) -> str:
    """Render a report in Markdown; the SVG next to each PNG in `root` is embedded."""
    # `html: False` leaves tags in texts as text, in addition to the escapes of the Markdown
    parser = MarkdownIt("commonmark", {"html": False, "xhtmlOut": False}).enable("table")
    tokens = parser.parse(markdown)
    _embed_pictures(tokens, root)
    _mark_verdicts(tokens)
    links = _link_headings(tokens)
    body = parser.renderer.render(tokens, parser.options, {})
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{_STYLE.read_text(encoding="utf-8")}</style>
</head>
<body>
{_contents(links)}<main>
{body}</main>
</body>
</html>
"""


def _embed_pictures(tokens: Sequence[Token], root: Path) -> None:
    """Embed pictures as images, because ids of inline SVG elements of two would collide."""
    for token in tokens:
        for image in token.children or ():
            if image.type != "image":
                continue

            picture = root / unquote(str(image.attrGet("src")))
            svg = b64encode(picture.with_suffix(".svg").read_bytes()).decode()
            image.attrSet("src", f"data:image/svg+xml;base64,{svg}")


def _mark_verdicts(tokens: Sequence[Token]) -> None:
    """Give each cell that is a verdict its colour: `equal within 0.01` has class `equal-within`."""
    for cell, text in pairwise(tokens):
        is_verdict = cell.type == "td_open" and text.content in _VERDICTS
        if is_verdict:
            first_words = text.content.split()[:2]
            cell.attrSet("class", "-".join(first_words))


def _link_headings(tokens: Sequence[Token]) -> dict[str, str]:
    """Give each heading of a figure an id; return id -> heading as HTML."""
    links: dict[str, str] = {}
    for heading, text in pairwise(tokens):
        is_of_figure = heading.type == "heading_open" and heading.tag == "h2"
        if not is_of_figure:
            continue

        name = f"section-{len(links) + 1}"
        heading.attrSet("id", name)
        parts = text.children or ()
        links[name] = "".join(escape(part.content) for part in parts)
    return links


def _contents(links: dict[str, str]) -> str:
    if len(links) < 2:
        return ""
    items = [f'<li><a href="#{name}">{title}</a></li>\n' for name, title in links.items()]
    return f'<nav aria-label="Contents">\n<ol>\n{"".join(items)}</ol>\n</nav>\n'
