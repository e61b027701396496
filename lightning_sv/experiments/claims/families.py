"""Which arms of the figures are a family, and the difference of two of them."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from lightning_sv.analysis.decision import CONFIDENCE
from lightning_sv.analysis.paired import PairedDifference
from lightning_sv.analysis.pooled import Families
from lightning_sv.experiments.checks import CORPUS_KEYS
from lightning_sv.experiments.results import Arm, Panel
from lightning_sv.runs.events import VAL_LOSS, Run

#: coverage of the interval of a comparison, which asks for no direction, and of a rule
TWO_SIDED = 0.95


@dataclass(frozen=True)
class LossAt:
    """Validation loss of a run at a share of its tokens, linear between evaluations; at 1 its last.

    Args:
        share: above 0 and at most 1
    """

    share: float = 1.0

    def __call__(self, run: Run) -> float:
        """Nats per token.

        Raises:
            ValueError: the run is not validated before
        """
        if self.share == 1.0:
            return run.val_loss
        curve, at = run.curve(VAL_LOSS), self.share * run.tokens
        if at < curve.tokens[0]:
            raise ValueError(
                f"{run.dir} has no validation loss around {at:,.0f} tokens, only from {curve.tokens[0]:,} to "
                f"{curve.tokens[-1]:,}; set data.validations, or another share in the claim."
            )
        return float(np.interp(at, curve.tokens, curve.values))


@dataclass(frozen=True)
class Change:
    """Loss at one share of a run's tokens, less that at another.

    Args:
        at: the earlier share
        until: the later one
    """

    at: float
    until: float

    def __call__(self, run: Run) -> float:
        """Nats per token."""
        return LossAt(self.until)(run) - LossAt(self.at)(run)


def families_of(panels: Iterable[Panel]) -> Families:
    """Arms that a panel compares after as many tokens of one text are a family, and so are all that share an arm.

    One model, optimizer, schedule and batch follow: it is what a panel's arms have in common. A size of a scaling
    panel is a family by itself; so is a grid, and the arms at its best values, whose seeds must not meet others.

    Args:
        panels: of all figures that are judged together
    """
    groups: list[list[Hashable]] = []
    runs: dict[Hashable, dict[int, Run]] = {}
    for panel in panels:
        for of in _compared(panel):
            alike: dict[Hashable, list[Hashable]] = {}
            for arm in of:
                if arm.runs:
                    seeds = arm.seeds or range(len(arm.runs))
                    runs.setdefault(_key(panel, arm), {}).update(zip(seeds, arm.runs, strict=True))
                    first = arm.runs[0]
                    text = tuple(first.summary.get(key) for key in CORPUS_KEYS)
                    alike.setdefault((first.tokens, *text), []).append(_key(panel, arm))
            groups += alike.values()
    return Families(groups, runs)


def _compared(panel: Panel) -> Iterator[list[Arm]]:
    """The arms of a panel that are of one size, with all runs that are there."""
    arms = {arm.label: arm for arm in panel.every or panel.arms}
    if panel.kind == "scaling":
        yield from ([arms[label] for label in labels] for labels in zip(*(s.arms for s in panel.series), strict=True))
    elif panel.kind != "table":
        yield list(arms.values())


def _key(panel: Panel, arm: Arm) -> Hashable:
    of_its_own = panel.title if panel.kind == "grid" or panel.outcome else ""
    return of_its_own, arm.recipe.identity if arm.recipe else arm.label


def difference(
    panel: Panel, a: Arm, b: Arm, of: Callable[[Run], float] = LossAt(), confidence: float = CONFIDENCE
) -> PairedDifference:
    """A - B, with the scatter of their family where there is one.

    Args:
        panel: that compares them
        a: arm in question
        b: arm it is compared with
        of: what is compared: the final loss, that at a share of the tokens, a change
        confidence: coverage of the interval

    Raises:
        ValueError: a run does not have it, or the arms share no seed
    """
    families = panel.families or families_of([panel])
    return families.difference(_key(panel, a), _key(panel, b), of, confidence)
