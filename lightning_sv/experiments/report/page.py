"""HTML page of a report, from its Markdown: self-contained, readable without network and scripts."""

from base64 import b64encode
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import get_args
from urllib.parse import unquote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markdown_it.token import Token

from lightning_sv.statistics.verdicts import VerdictWord

_VERDICTS: tuple[str, ...] = get_args(VerdictWord)


def html_page(markdown: str, root: Path) -> str:
    """Render a `markdown_report`: contents, counts of verdicts, and the SVG next to each PNG in `root`, embedded."""
    parser = MarkdownIt("commonmark", {"html": False, "xhtmlOut": False}).enable("table")
    parser.add_render_rule("table_open", lambda *_: '<div class="wide"><table>\n')
    parser.add_render_rule("table_close", lambda *_: "</table></div>\n")
    tokens = parser.parse(markdown)
    verdicts = _prepare(tokens, root)
    starts = [i for i, token in enumerate(tokens) if token.tag == "h2" and token.nesting == 1]
    html = [
        parser.renderer.render(tokens[i:j], parser.options, {})
        for i, j in pairwise([3, *starts, len(tokens)])  # the template has the title, which is three tokens
    ]
    titles = [_words(tokens[i + 1]) for i in starts]
    loader = FileSystemLoader(Path(__file__).parent)
    frame = Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template("page.html")
    return frame.render(
        title=_words(tokens[1]),
        counts=[(word, _class(word), verdicts[word]) for word in _VERDICTS if verdicts[word]],
        head=html[0],
        sections=list(zip(titles, html[1:], strict=True)),  # each with its heading
    )


def _prepare(tokens: Sequence[Token], root: Path) -> Counter[str]:
    """Set attributes of cells and verdicts, embed pictures; count the verdicts of the first table that has some."""
    columns: list[str] = []
    cells: Iterator[str] = iter(())
    tables: list[Counter[str]] = []
    for token, inside in pairwise(tokens):
        if token.type == "table_open":
            columns = []
            tables.append(Counter())
        elif token.type == "tr_open":
            cells = iter(columns)
        elif token.type == "th_open":
            columns.append(_words(inside))
        elif token.type == "td_open":
            column, word = next(cells), _words(inside)
            if column:
                token.attrSet("data-column", column)
            if column == "corrected" and word in _VERDICTS:
                token.attrSet("class", _class(word))
            if column == "verdict" and word in _VERDICTS:
                token.attrSet("class", f"verdict {_class(word)}")
                tables[-1][word] += 1
        elif token.type == "paragraph_open" and inside.children:
            pictures = [child for child in inside.children if child.type == "image"]
            for picture in pictures:
                # embedded as an image, because ids of inline SVG elements would collide between pictures
                svg = (root / unquote(str(picture.attrGet("src")))).with_suffix(".svg").read_bytes()
                picture.attrSet("src", f"data:image/svg+xml;base64,{b64encode(svg).decode()}")
            if pictures:
                token.attrSet("class", "picture")
    return next(filter(None, tables), Counter())  # the table of all claims is the first


def _words(inline: Token) -> str:
    return "".join(child.content for child in inline.children or ())


def _class(verdict: str) -> str:
    """`not testable here` -> `not-testable`, `equal within 0.01` -> `equal-within`."""
    return "-".join(verdict.split()[:2])
