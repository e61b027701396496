"""Decisions on claims: an estimate and its test become a verdict with a sentence."""

import math
from collections.abc import Sequence
from dataclasses import replace

from lightning_sv.errors import NotTestableError
from lightning_sv.experiments.claims.claim_types import KINDS, Estimate
from lightning_sv.experiments.kinds.base import LoadedPanel
from lightning_sv.experiments.results import Figure, Verdict
from lightning_sv.experiments.spec import ClaimSpec
from lightning_sv.statistics.verdicts import ALPHA, NOT_RESOLVED, NOT_TESTABLE, Outcome

#: a claim with the verdicts on it
Decided = tuple[ClaimSpec, Sequence[Verdict]]


def evaluate_claim(claim: ClaimSpec, panel: LoadedPanel, figure: Figure) -> list[Verdict]:
    """Decide a claim, or return why its runs or this budget do not test it."""
    why_not = _why_skipped(claim, panel, figure.budget)
    if why_not is None:
        try:
            results = verdicts(claim, panel, figure.paper_scale)
        except NotTestableError as error:  # the other claims are still decided
            why_not = str(error)
    if why_not is not None:
        results = [not_testable(claim, why_not.rstrip("."))]
    return [replace(verdict, panel=panel.title) for verdict in results]


def _why_skipped(claim: ClaimSpec, panel: LoadedPanel, budget: str) -> str | None:
    """Return why a budget does not test a claim.

    The reason is that of the claim, of one of its arms, or of a panel without runs.
    """
    if budget in claim.skip_under:
        return claim.skip_under[budget]
    for label in (claim.a, claim.b):
        if label in panel.skipped:
            return panel.skipped[label]
    return None if panel.is_shown else panel.why_not


def verdicts(claim: ClaimSpec, panel: LoadedPanel, paper_scale: bool = False) -> list[Verdict]:
    """Decide a claim by the runs of its own arms.

    There is one verdict per part, and per size unless the claim is about a slope.

    Raises:
        NotTestableError: an arm without runs, a slope of one size, or a run without the values of
            the claim
    """
    if claim.kind == "slope" or not panel.sizes:
        return _verdicts_of_parts(claim, panel, paper_scale)

    results = []
    errors = []
    for size in panel.sizes:
        at_size = replace(claim, a=f"{claim.a}, {size}", b=f"{claim.b}, {size}")
        try:
            results += _verdicts_of_parts(at_size, panel, paper_scale)
        except NotTestableError as error:  # the other sizes are still decided
            errors.append(error)
            results.append(not_testable(at_size, str(error).rstrip(".")))
    if len(errors) == len(panel.sizes):
        raise errors[0]
    return results


def _verdicts_of_parts(claim: ClaimSpec, panel: LoadedPanel, paper_scale: bool) -> list[Verdict]:
    if claim.kind == "slope" and len(panel.sizes) < 2:
        raise NotTestableError("one size gives no slope")
    own = panel.only([label for label in (claim.a, claim.b) if label])
    why_not = _why_too_short(claim, own)
    if why_not is not None:
        return [not_testable(claim, why_not)]
    return [_decide(part, own, paper_scale) for part in KINDS[claim.kind].parts(claim)]


def _why_too_short(claim: ClaimSpec, panel: LoadedPanel) -> str | None:
    """Return why runs are too short: they end before A is known to pass B."""
    lengths = [arm.run_spec.steps for arm in panel.arms if arm.run_spec]
    shortest = min(lengths, default=claim.crossing)
    if shortest >= claim.crossing:
        return None
    known = f"{claim.a} is known to pass {claim.b} at about {claim.crossing:,}"
    return f"runs end after {shortest:,} steps, and {known}"


def statement(claim: ClaimSpec) -> str:
    """Return the statement of a claim."""
    if claim.text:
        return claim.text
    is_late = claim.until == 1
    more = f" by more than {claim.margin:g}" if claim.margin else ""
    if not is_late:
        more += f" at {claim.until:.0%} of the tokens"
    fields = {
        **vars(claim),
        "tags": " and ".join(_branch_of(tag) for tag in claim.tags),
        "more": more,
        "ends": "ends" if is_late else "is",
    }
    return KINDS[claim.kind].statement.format(**fields)


def _branch_of(tag: str) -> str:
    """Return `q_proj` of `branch_norm/mean/q_proj/effective`; other tags are their own names."""
    return tag.split("/")[-2] if tag.count("/") > 1 else tag


def not_testable(claim: ClaimSpec, why: str) -> Verdict:
    """Return the verdict on a claim that these runs, or this budget, do not test."""
    return Verdict(
        claim=statement(claim),
        verdict=NOT_TESTABLE,
        sentence=f"Not testable here: {why}.",
        estimate=None,
        low=None,
        high=None,
        n=0,
        smallest=None,
        paper=claim.paper,
    )


def _decide(claim: ClaimSpec, panel: LoadedPanel, paper_scale: bool) -> Verdict:
    """Decide a claim of one part by the runs of a panel that has only its arms."""
    estimate = KINDS[claim.kind].measure(claim, panel)
    d = estimate.d
    outcome = _outcome(claim, estimate)
    is_same_quantity = paper_scale and not estimate.part
    paper_value = claim.paper_value if is_same_quantity and d.low is not None else None
    agreement = _agreement(estimate, paper_value)

    details = [estimate.detail]
    if outcome.word == NOT_RESOLVED and outcome.to_go:
        details.append(outcome.to_go)
    details += _diverged_sentences(claim, panel)
    if paper_value is not None:
        place = "inside" if agreement == "consistent" else "outside"
        details.append(f"the paper's {paper_value:+g} lies {place}")
    return Verdict(
        claim=statement(claim),
        verdict=outcome.word,
        sentence=f"{outcome.word.capitalize()}: {'; '.join(details)}.",
        estimate=d.mean,
        low=d.low,
        high=d.high,
        n=d.n,
        smallest=d.smallest_resolvable,
        paper=claim.paper,
        unit=estimate.unit,
        confidence=d.confidence,
        part=estimate.part,
        p=None if d.se is None else min(1.0, outcome.p),
        df=d.df,
        paper_value=paper_value,
        agreement=agreement,
        sides=estimate.sides,
        own_low=None if d.alone is None else d.alone.low,
        own_high=None if d.alone is None else d.alone.high,
    )


def _outcome(claim: ClaimSpec, estimate: Estimate) -> Outcome:
    """Test an estimate; p is below ALPHA if the interval decides, whatever its coverage."""
    d = estimate.d
    margin = claim.margin
    if estimate.unit == "times":
        margin = math.log(claim.margin or 1.0)
    outcome = estimate.outcome
    if outcome is None:
        outcome = KINDS[claim.kind].test(estimate.tested or d, margin)
    word = NOT_RESOLVED if d.se is None else outcome.word  # one pair gives no verdict
    return outcome._replace(word=word, p=outcome.p * (2 * ALPHA / (1 - d.confidence)))


def _diverged_sentences(claim: ClaimSpec, panel: LoadedPanel) -> list[str]:
    """Return sentences on diverged runs: the remaining ones are selected by their success."""
    sentences = []
    for arm in panel.arms:
        if arm.diverged and arm.label in (claim.a, claim.b):
            count = len(arm.diverged)
            sentences.append(f"diverged runs of {arm.label}, which are left out: {count}")
    return sentences


def _agreement(estimate: Estimate, paper_value: float | None) -> str:
    """Return whether the interval contains the number of the paper; empty without one."""
    d = estimate.d
    if paper_value is None or d.low is None or d.high is None:
        return ""
    return "consistent" if d.low <= paper_value <= d.high else "not consistent"


def mark_primary(decided: Sequence[Decided]) -> tuple[Verdict, ...]:
    """Return the verdicts of a figure without duplicates, and mark the primary one."""
    primary = _primary(decided)
    marked = dict[tuple[str, str, str], Verdict]()
    for _, results in decided:
        for verdict in results:
            is_primary = primary is not None and _place(verdict) == _place(primary)
            marked.setdefault(_place(verdict), replace(verdict, primary=is_primary))
    return tuple(marked.values())


def _place(verdict: Verdict) -> tuple[str, str, str]:
    return verdict.panel, verdict.claim, verdict.sentence


def _primary(decided: Sequence[Decided]) -> Verdict | None:
    """Return the primary verdict of a figure.

    It is that of the claim marked in the YAML, or else of the first claim that was tested; of its
    largest tested size.
    """
    has_mark = any(claim.primary for claim, _ in decided)
    for claim, results in decided:
        tested = [verdict for verdict in results if verdict.verdict != NOT_TESTABLE]
        if has_mark and claim.primary:
            return tested[-1] if tested else None
        if tested and not has_mark:
            return tested[-1]
    return None
