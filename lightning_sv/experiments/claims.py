"""A claim of a figure and what its runs say about it: one of four words, with the numbers."""

from dataclasses import replace

from lightning_sv.experiments.figures import unknown
from lightning_sv.experiments.judge import NOT_RESOLVED, NOT_TESTABLE
from lightning_sv.experiments.kinds import KINDS, SINGLE
from lightning_sv.experiments.results import PanelResult, Verdict
from lightning_sv.experiments.spec import ClaimSpec, PanelSpec


def check_claims(panel: PanelSpec, where: str) -> None:
    """Refuse a claim that no run of the panel could decide, or settings that it does not have, before any is trained.

    Args:
        panel: As in the YAML.
        where: Names it to the user.

    Raises:
        ValueError: An unknown kind or arm, a kind that such a panel does not have, or one without what it needs.
    """
    for claim in panel.claims:
        if claim.kind not in KINDS:
            raise unknown(f"{where}: claim of kind", claim.kind, list(KINDS))
        kind = KINDS[claim.kind]
        if panel.kind not in kind.panels:
            raise ValueError(f"{where}: a claim {claim.kind!r} needs a panel of kind {' or '.join(kind.panels)}, "
                             f"this one is {panel.kind!r}.")  # fmt: skip
        for label in [claim.a, claim.b] if "{b}" in kind.statement else [claim.a]:
            if label not in panel.arms:
                raise unknown(f"{where}: claim {claim.kind!r}: arm", label, list(panel.arms))
        if lacking := kind.needs(claim, panel):
            raise ValueError(f"{where}: a claim {claim.kind!r} needs {lacking}.")
    if panel.kind != "grid" and (own := [label for label, arm in panel.arms.items() if arm.values]):
        raise ValueError(f"{where}: arm {own[0]!r} has values of a grid, and the panel is {panel.kind!r}; set the key "
                         "of one run under 'set'.")  # fmt: skip
    if panel.rule is not None and (panel.kind != "grid" or len(panel.arms) != 2):
        raise ValueError(f"{where}: a rule decides between the two arms of a grid; this is {panel.kind!r} with "
                         f"{len(panel.arms)}.")  # fmt: skip


def verdicts(claim: ClaimSpec, panel: PanelResult) -> tuple[Verdict, ...]:
    """Verdict on a claim that was checked; on a scaling panel one per size, where it is about two arms of one size."""
    sizes = panel.extra["series"][0]["sizes"] if panel.kind == "scaling" else []
    if claim.kind == "slope" and len(sizes) < 2:
        return (not_testable(claim, "one size gives no slope"),)
    if panel.kind == "scaling" and claim.kind != "slope":
        return tuple(_verdict(replace(claim, a=f"{claim.a}, {s}", b=f"{claim.b}, {s}"), panel) for s in sizes)
    return (_verdict(claim, panel),)


def statement(claim: ClaimSpec) -> str:
    """The claim in words."""
    return claim.text or KINDS[claim.kind].statement.format(
        a=claim.a, b=claim.b, margin=claim.margin, at=claim.at,
        tags=" and ".join(tag.split("/")[-2] for tag in claim.tags), until=claim.until,
        more=f" by more than {claim.margin:g}" if claim.margin else "",
    )  # fmt: skip


def not_testable(claim: ClaimSpec, why: str) -> Verdict:
    """The verdict on what this scale cannot show."""
    return Verdict(statement(claim), NOT_TESTABLE, f"Not testable at this scale: {why}.", None, None, None, 0, None,
                   claim.paper)  # fmt: skip


def _verdict(claim: ClaimSpec, panel: PanelResult) -> Verdict:
    word, d, detail, unit = KINDS[claim.kind].judge(claim, panel)
    word = word if d.n > 1 else NOT_RESOLVED  # never a verdict from one run
    hint = ""
    if word == NOT_RESOLVED and claim.kind in SINGLE and d.smallest_resolvable is not None:
        hint = (
            f"; {d.n} pairs resolve effects above about {d.smallest_resolvable:.3f}, one of that size in half the cases"
        )
    sentence = f"{word.capitalize()}: {detail}{hint}."
    return Verdict(statement(claim), word, sentence, d.mean, d.low, d.high, d.n, d.smallest_resolvable, claim.paper,
                   unit=unit, confidence=d.confidence)  # fmt: skip
