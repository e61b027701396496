"""Report of `apply_strategy`: what was added, what deviates, and how much the outputs changed."""

from collections.abc import Sequence
from typing import NamedTuple

from lightning_sv.scale import ScaleStrategy


class Report(NamedTuple):
    """Result of `apply_strategy`.

    Attributes:
        strategy: the strategy
        vectors: module names of the added scale vectors; not those that a norm keeps in its own
            form
        notes: (name, deviation from the strategy and its reason)
        difference: largest difference of the outputs before and after, relative to the largest
            output
        same_function: True if the strategy preserves the function (all but `dnp`) and `difference`
            is rounding
        stacked: vectors of stacked experts: their parameters have several axes, like those of
            matrices
        dp_at: matrices that have `dp` instead of the strategy's `dnp`
    """

    strategy: ScaleStrategy
    vectors: tuple[str, ...]
    notes: tuple[tuple[str, str], ...]
    difference: float
    same_function: bool
    stacked: tuple[str, ...] = ()
    dp_at: tuple[str, ...] = ()

    def __str__(self) -> str:
        effect = "the function changes"
        if self.same_function:
            effect = "the function is preserved"
        counts = f"{self._label}: {len(self.vectors)} scale vectors"
        head = f"{counts}; {effect}, outputs differ by {self.difference:.1e}"
        return "\n".join([head, *self._lines])

    @property
    def warning(self) -> str | None:
        """One line for a warning; None if the report has no notes."""
        names = [name for name, _ in self.notes]
        names += self.stacked
        if not names:
            return None
        different = list(dict.fromkeys(names))
        return f"apply_strategy has notes on {_first_of(different)}; print the report it returns."

    @property
    def _label(self) -> str:
        """The strategy, with its exceptions."""
        if not self.dp_at:
            return str(self.strategy)
        exceptions = ",".join(f"{name}=dp" for name in self.dp_at)
        return f"{self.strategy}[{exceptions}]"

    @property
    def _lines(self) -> list[str]:
        """One line per deviation, and one on stacked experts."""
        names: dict[str, list[str]] = {}
        for name, note in self.notes:
            names.setdefault(note, []).append(name)
        lines = [f"  {_first_of(alike)}: {note}" for note, alike in names.items()]
        if self.stacked:
            what = "several rows, and so two axes; choose what decays, and what Muon updates"
            lines.append(f"  {_first_of(self.stacked)}: {what}, by role")
        return lines


def _first_of(names: Sequence[str]) -> str:
    """Return the first name, and the number of the others."""
    first, *others = names
    if not others:
        return first
    return f"{first} and {len(others)} more"
