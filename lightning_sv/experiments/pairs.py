"""Pairs of the baseline and one other arm on the same seeds: differences of final losses, and in tokens."""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from rich.console import Console

from lightning_sv.analysis.paired import PairedDifference, TokenEfficiency, token_efficiency
from lightning_sv.analysis.verdicts import difference_sentence, direction, tokens_sentence
from lightning_sv.errors import NotTestableError
from lightning_sv.experiments.claims.pooling import TWO_SIDED
from lightning_sv.experiments.results import Arm, Figure, Panel
from lightning_sv.experiments.spec import PanelSpec

# scalars of `callbacks.Sharpness` that a report draws
_SHARPNESS = re.compile(r"sharpness/\w+/(lambda_max|trace)")


@dataclass(frozen=True, eq=False)
class Pair:
    """The baseline A and one other arm B on the seeds that they share; differences are B - A."""

    a: Arm
    b: Arm
    difference: PairedDifference

    @cached_property
    def efficiency(self) -> TokenEfficiency:
        """Tokens of both arms to the higher one of their final losses."""
        return token_efficiency(self.a.curves, self.b.curves, TWO_SIDED, to_higher=True)

    def sentence(self) -> str:
        """Return the verdict as a sentence."""
        return difference_sentence(self.a.label, self.b.label, self.difference)

    def tokens_sentence(self) -> str:
        """Return the ratio of their tokens as a sentence."""
        return tokens_sentence(self.a.label, self.b.label, self.efficiency, TWO_SIDED)

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers of the pair as JSON types."""
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
                "per_seed": (self.b.losses - self.a.losses).tolist(),
            },
            "tokens_to_higher_final_loss": {**asdict(e), "n": e.n},
        }


def pairs_of(panel: Panel) -> tuple[list[Pair], list[str]]:
    """Pair the baseline with each other arm, per size; also return a sentence for each arm without a pair."""
    alike = [(a, b) for b in panel.arms if not b.baseline for a in panel.arms if a.baseline and a.size == b.size]
    couples = alike if panel.kind in ("curves", "scaling", "lengths") else []
    pairs, lost = [], []
    for a, b in couples:
        try:
            pairs.append(Pair(*a.paired(b), panel.difference(b, a, confidence=TWO_SIDED)))
        except NotTestableError as error:
            lost.append(f"{b.label} and {a.label} are not compared: {error}")
    return pairs, lost


def described(figure: Figure) -> Figure:
    """Add a sentence on each pair to a figure of one panel, and panels for branch norms and sharpness if logged."""
    from lightning_sv.analysis.run_plot import branch_norms  # it imports matplotlib, which a dry run does not need

    (panel,) = figure.panels
    pairs, lost = pairs_of(panel)
    said = (f"{pair.sentence()} {pair.tokens_sentence()}" for pair in pairs)
    runs = [run for arm in panel.arms for run in arm.runs]
    more = [PanelSpec("Branches", kind="qkv")] * all(branch_norms(run) for run in runs)
    tags = dict.fromkeys(tag for run in runs for tag in run.curves if _SHARPNESS.fullmatch(tag))
    more += [PanelSpec(f"Hessian of the held-out loss: {tag}", kind="scalar", tag=tag) for tag in tags]
    panels = (replace(panel, notes=(*said, *panel.notes)), *(replace(panel, spec=spec) for spec in more))
    return replace(figure, panels=panels, warnings=(*figure.warnings, *lost))


def print_pairs(console: Console, pairs: Iterable[Pair], warnings: Iterable[str]) -> None:
    """Print two sentences per pair, and warnings."""
    for pair in pairs:
        console.print(pair.sentence(), markup=False, highlight=False, style="bold")
        console.print(pair.tokens_sentence(), markup=False, highlight=False)
    for warning in warnings:
        console.print(f"Warning: {warning}", markup=False, highlight=False, style="yellow")
