"""What `apply_strategy` reports."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lightning_sv.interop.apply.traced_norm import TracedNorm
from lightning_sv.roles.api import TracedModel
from lightning_sv.roles.types import ModelParameter
from lightning_sv.scale import ScaleStrategy

_MATRICES = ("matrix", "router", "head")


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
    """

    strategy: ScaleStrategy
    vectors: tuple[str, ...]
    notes: tuple[tuple[str, str], ...]
    difference: float
    same_function: bool
    stacked: tuple[str, ...] = ()

    def __str__(self) -> str:
        effect = "the function is preserved" if self.same_function else "the function changes"
        counts = f"{self.strategy}: {len(self.vectors)} scale vectors"
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


def notes_on_model(
    traced: TracedModel, strategy: ScaleStrategy, norms: list[TracedNorm]
) -> Iterator[tuple[str, str]]:
    """Yield notes on layers without norms, and on parameters that the pass did not reach."""
    adds_vectors = strategy.per_branch or strategy.placement_row.scale_out
    if adds_vectors and _lacks_norms(traced, norms):
        why = "none of the others follows a norm whose output only matrices read"
        yield type(traced.model).__name__, f"no matrix except the head gets a vector, because {why}"
    reached = traced.uses.keys() | traced.scaled.keys()
    for row in traced.roles.parameters:
        if row.name not in reached:
            yield from _notes_on_unreached(row, is_known=row.name in traced.known)


def _notes_on_unreached(row: ModelParameter, *, is_known: bool) -> Iterator[tuple[str, str]]:
    if is_known and row.role in _MATRICES:
        yield row.name, "unchanged, not reached: its norm's vectors moved to other matrices"
    if not is_known and row.role == "other" and row.trained:
        yield row.name, "unchanged, because the forward pass did not reach it"


def _lacks_norms(traced: TracedModel, norms: list[TracedNorm]) -> bool:
    """Return True if no layer's matrix is behind a norm, as in OLMo 2."""
    layers = {row.name for row in traced.roles.parameters if row.role == "matrix"}
    for norm in norms:
        if not layers.isdisjoint(norm.readers):
            return False
    return bool(layers)
