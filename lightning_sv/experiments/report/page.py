"""HTML page of a report: its Markdown in a frame, self-contained and without scripts."""

from base64 import b64encode
from collections.abc import Sequence
from html import escape
from itertools import chain
from pathlib import Path
from urllib.parse import unquote

from markdown_it import MarkdownIt
from markdown_it.token import Token

_STYLE = Path(__file__).with_name("page.css")


def html_page(title: str, markdown: str, root: Path) -> str:
    """Render a report in Markdown; the SVG next to each PNG in `root` is embedded."""
    # `html: False` leaves tags in texts as text, in addition to the escapes of the Markdown
    parser = MarkdownIt("commonmark", {"html": False, "xhtmlOut": False}).enable("table")
    tokens = parser.parse(markdown)
    _embed_pictures(tokens, root)
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
<main>
{body}</main>
</body>
</html>
"""


def _embed_pictures(tokens: Sequence[Token], root: Path) -> None:
    """Embed pictures as images, because ids of inline SVG elements of two would collide."""
    parts = chain.from_iterable(token.children or () for token in tokens)
    for part in parts:
        if part.type == "image":
            picture = root / unquote(str(part.attrGet("src")))
            svg = b64encode(picture.with_suffix(".svg").read_bytes()).decode()
            part.attrSet("src", f"data:image/svg+xml;base64,{svg}")
