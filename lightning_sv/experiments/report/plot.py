"""A finished plot and its files."""

from pathlib import Path
from typing import NamedTuple

from matplotlib import rc_context
from matplotlib.figure import Figure


class Plot(NamedTuple):
    """A plot: a name for its file, alternative text, the figure."""

    name: str
    alt: str
    figure: Figure

    def save(self, stem: Path) -> None:
        """Write `stem`.png and `stem`.svg; equal figures have equal bytes."""
        stem.parent.mkdir(parents=True, exist_ok=True)
        with rc_context({"svg.hashsalt": "lightning_sv"}):
            self.figure.savefig(f"{stem}.svg", metadata={"Date": None})
            self.figure.savefig(f"{stem}.png")
