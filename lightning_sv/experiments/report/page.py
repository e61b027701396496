"""HTML page of a report: self-contained, readable without network and scripts."""

from base64 import b64encode
from collections import Counter
from pathlib import Path
from typing import get_args

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from lightning_sv.experiments.report.content import Content
from lightning_sv.statistics.verdicts import VerdictWord

_VERDICTS: tuple[str, ...] = get_args(VerdictWord)


def html_page(content: Content, root: Path) -> str:
    """Render a report; the SVG next to each PNG in `root` is embedded."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

    def embedded(path: str) -> str:
        # as an image, because ids of inline SVG elements would collide between pictures
        svg = (root / path).with_suffix(".svg").read_bytes()
        return f"data:image/svg+xml;base64,{b64encode(svg).decode()}"

    environment.filters |= {"embedded": embedded, "cell_class": _cell_class}
    counts = Counter(content.claims.get("verdict", ()))
    return environment.get_template("page.html").render(
        content=content,
        counts=[(word, counts[word]) for word in _VERDICTS if counts[word]],
    )


def _cell_class(cell: str, column: str) -> str:
    """Return the CSS class of a cell: `verdict equal-within`, or empty if it is no verdict."""
    if cell not in _VERDICTS:
        return ""
    colour = "-".join(cell.split()[:2])
    if column == "verdict":
        return f"verdict {colour}"
    if column == "corrected":
        return colour
    return ""
