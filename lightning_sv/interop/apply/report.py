"""What `apply_strategy` reports."""

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
        effect = "the function is preserved" if self.same_function else "the function changes"
        exceptions = ",".join(f"{name}=dp" for name in self.dp_at)
        label = f"{self.strategy}[{exceptions}]" if exceptions else str(self.strategy)
        counts = f"{label}: {len(self.vectors)} scale vectors"
        rows = [f"{counts}; {effect}, outputs differ by {self.difference:.1e}"]
        names: dict[str, list[str]] = {}
        for name, note in self.notes:
            names.setdefault(note, []).append(name)
        for note, alike in names.items():
            rows.append(f"  {_first_of(alike)}: {note}")
        if self.stacked:
            what = "a row per expert, and so two axes; choose what decays, and what Muon updates"
            rows.append(f"  {_first_of(self.stacked)}: {what}, by role")
        return "\n".join(rows)


def _first_of(names: Sequence[str]) -> str:
    """Return the first name, and the number of the others."""
    first, *others = names
    if not others:
        return first
    return f"{first} and {len(others)} more"
