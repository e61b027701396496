"""What claims that are judged together share: the scatter of the runs, and chance.

The difference of two arms takes the scatter of their family, the arms of one model and budget in all figures; and of
many verdicts some come out by chance, for which they are corrected.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_sv.analysis.decision import ALPHA, CONFIDENCE, NOT_RESOLVED, NOT_TESTABLE
from lightning_sv.analysis.paired import PairedDifference
from lightning_sv.analysis.pooled import Families, benjamini_hochberg, holm
from lightning_sv.errors import NotTestableError
from lightning_sv.experiments.checks import CORPUS_KEYS
from lightning_sv.experiments.claims.outcome import Verdict
from lightning_sv.experiments.results import Arm, Figure, Panel
from lightning_sv.experiments.spec import ClaimSpec
from lightning_sv.runs.events import VAL_LOSS, Run

#: coverage of the interval of a comparison, which asks for no direction, and of a rule
TWO_SIDED = 0.95


@dataclass(frozen=True)
class LossAt:
    """Validation loss of a run at a share of its tokens, linear between evaluations; or a change of it.

    Args:
        share: above 0 and at most 1; at 1 the last loss
        since: the earlier share, whose loss is subtracted; None for the loss itself
    """

    share: float = 1.0
    since: float | None = None

    def __call__(self, run: Run) -> float:
        """Nats per token.

        Raises:
            NotTestableError: the run is not validated before
        """
        if self.since is not None:
            return LossAt(self.share)(run) - LossAt(self.since)(run)
        if self.share == 1.0:
            return run.val_loss
        curve, at = run.curve(VAL_LOSS), self.share * run.tokens
        if at < curve.tokens[0]:
            raise NotTestableError(
                f"{run.dir} has no validation loss around {at:,.0f} tokens, only from {curve.tokens[0]:,} to "
                f"{curve.tokens[-1]:,}; set data.validations, or another share in the claim."
            )
        return float(np.interp(at, curve.tokens, curve.values))


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
        for of in panel.alike(panel.every or panel.arms) if panel.kind != "table" else []:
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


def _key(panel: Panel, arm: Arm) -> Hashable:
    of_its_own = panel.title if panel.kind == "grid" else ""
    return of_its_own, arm.recipe.identity if arm.recipe else arm.label


def difference(
    panel: Panel, a: Arm, b: Arm, of: Callable[[Run], float] = LossAt(), confidence: float | None = None
) -> PairedDifference:
    """A - B, with the scatter of their family where there is one.

    Args:
        panel: that compares them
        a: arm in question
        b: arm it is compared with
        of: what is compared: the final loss, that at a share of the tokens, a change
        confidence: coverage of the interval; None for that of the panel

    Raises:
        NotTestableError: a run does not have it, or the arms share no seed
    """
    families = panel.families or families_of([panel])
    return families.difference(_key(panel, a), _key(panel, b), of, confidence or CONFIDENCE)


def one_primary(claims: Sequence[tuple[ClaimSpec, Sequence[Verdict]]]) -> tuple[Verdict, ...]:
    """The verdicts of a figure, each once, one of them primary.

    Of the claim that its YAML says, or else of the first that can be tested; of its sizes the largest that can.

    Args:
        claims: each with its verdicts; a part of one may be all of another
    """
    able = [(claim, [v for v in found if v.verdict != NOT_TESTABLE]) for claim, found in claims]
    said = [found for claim, found in able if claim.primary] or [found for _, found in able if found]
    primary = said[0][-1:] if said else []
    once: dict[tuple[str, str], Verdict] = {}
    for _, found in claims:
        for verdict in found:
            once.setdefault((verdict.panel, verdict.claim), verdict)
    marked = {(verdict.panel, verdict.claim) for verdict in primary}
    return tuple(replace(verdict, primary=key in marked) for key, verdict in once.items())


def corrected(figures: Sequence[Figure]) -> list[Figure]:
    """Figures whose verdicts say what is left of them: Holm over the primary ones, Benjamini-Hochberg over the rest.

    A claim that is tested by one side asks twice, for its opposite is tested too, so its p counts twice. Then among the
    primary ones that are left no false one is with probability 0.95; of the others that are left one in twenty is
    expected to be.
    """
    tested = [v for figure in figures for v in figure.verdicts if v.p is not None]
    found: dict[Verdict, float] = {}
    for primary, rule in ((True, holm), (False, benjamini_hochberg)):
        asked = [v for v in tested if v.primary == primary]
        found |= dict(zip(asked, rule([min(1.0, 2 / v.sides * v.p) for v in asked if v.p is not None]), strict=True))
    return [replace(f, verdicts=tuple(_left(v, found.get(v)) for v in f.verdicts)) for f in figures]


def _left(verdict: Verdict, p: float | None) -> Verdict:
    gone = verdict.verdict != NOT_TESTABLE and (p is None or p >= ALPHA)
    return replace(verdict, p_corrected=p, corrected=NOT_RESOLVED if gone else verdict.verdict)
