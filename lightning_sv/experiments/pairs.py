"""Pairs of a baseline and another arm that share a seed: differences of final losses, and in tokens.

Every number about an arm that is not the baseline is about its pair with it; the others are not compared with each
other. All losses are the last `val/loss` of the runs' event files, nats per token.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from rich.console import Console

from lightning_sv.analysis.paired import PairedDifference, TokenEfficiency, token_factor
from lightning_sv.analysis.verdicts import difference_sentence, direction, tokens_sentence
from lightning_sv.errors import NotTestableError
from lightning_sv.experiments.claims.pooling import TWO_SIDED
from lightning_sv.experiments.results import Arm, Figure, Panel
from lightning_sv.experiments.spec import PanelSpec


@dataclass(frozen=True, eq=False)
class Pair:
    """The baseline A and one other arm B, in pairs that share a seed; differences are B - A."""

    a: Arm
    b: Arm
    difference: PairedDifference

    @property
    def title(self) -> str:
        """Name of the difference, e.g. `unified - llama`."""
        return f"{self.b.label} - {self.a.label}"

    @property
    def per_seed(self) -> list[float]:
        """B - A of every seed, nats per token."""
        return [float(x) for x in self.b.losses - self.a.losses]

    @cached_property
    def efficiency(self) -> TokenEfficiency:
        """Tokens each of the two needs for the higher of their final losses."""
        return token_factor(self.a.curves, self.b.curves, TWO_SIDED)

    def sentence(self) -> str:
        """The verdict as one plain sentence."""
        return difference_sentence(self.a.label, self.b.label, self.difference)

    def tokens_sentence(self) -> str:
        """The ratio of their tokens as one plain sentence."""
        return tokens_sentence(self.a.label, self.b.label, self.efficiency, TWO_SIDED)

    def to_dict(self) -> dict[str, Any]:
        """Every number of the pair; plain JSON types."""
        d, e = self.difference, self.efficiency
        word = direction(d)
        resolved = word in ("lower", "higher")
        return {
            "b": self.b.label,
            "sentence": self.sentence(),
            "tokens_sentence": self.tokens_sentence(),
            "difference": {
                **asdict(d),
                "verdict": f"B {word}" if resolved else word,
                "resolved": resolved,
                "smallest_resolvable": d.smallest_resolvable,
                "per_seed": self.per_seed,
            },
            "tokens_to_higher_final_loss": {**asdict(e), "n": e.n},
        }


def pairs_of(panel: Panel) -> tuple[list[Pair], list[str]]:
    """The baseline with each other arm, at equal sizes where there are several; a sentence on each that has no pair."""
    base = next((arm for arm in panel.arms if arm.baseline), None)
    couples = [(base, arm) for arm in panel.arms if panel.kind == "curves" and base and arm is not base]
    if panel.sizes and (of := panel.baseline):
        at = dict(zip(of.sizes, of.arms, strict=True))
        others = [(size, x) for s in panel.series if s is not of for size, x in zip(s.sizes, s.arms, strict=True)]
        couples = [(panel.arm(at[size]), panel.arm(x)) for size, x in others if size in at]
    pairs, lost = [], []
    for a, b in couples:
        try:
            pairs.append(Pair(*a.paired(b), panel.difference(b, a, confidence=TWO_SIDED)))
        except NotTestableError as error:
            lost.append(f"{b.label} and {a.label} are not compared: {error}")
    return pairs, lost


def described(figure: Figure) -> Figure:
    """A figure of one panel of losses with a sentence on each pair, and branch norms if all runs logged them."""
    from lightning_sv.analysis.run_plot import branch_norms  # matplotlib, which a dry run does without

    (panel,) = figure.panels
    pairs, lost = pairs_of(panel)
    said = (f"{pair.sentence()} {pair.tokens_sentence()}" for pair in pairs)
    panels = [replace(panel, notes=(*said, *panel.notes))]
    if all(branch_norms(run) for arm in panel.arms for run in arm.runs):
        panels.append(replace(panels[0], spec=PanelSpec("Branches", kind="qkv")))
    return replace(figure, panels=tuple(panels), warnings=(*figure.warnings, *lost))


def print_pairs(console: Console, pairs: Iterable[Pair], warnings: Iterable[str]) -> None:
    """Show two sentences a pair, and warnings."""
    for pair in pairs:
        console.print(pair.sentence(), markup=False, highlight=False, style="bold")
        console.print(pair.tokens_sentence(), markup=False, highlight=False)
    for warning in warnings:
        console.print(f"Warning: {warning}", markup=False, highlight=False, style="yellow")
