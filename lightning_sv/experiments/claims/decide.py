"""Decisions on claims: an estimate and its test become a verdict with a sentence."""

import math
from collections.abc import Sequence
from dataclasses import replace

from lightning_sv.errors import NotTestableError
from lightning_sv.experiments.arms import point_label
from lightning_sv.experiments.claims.claim_types import KINDS, Estimate, branch_of
from lightning_sv.experiments.kinds.base import LoadedPanel
from lightning_sv.experiments.results import Figure, Verdict
from lightning_sv.experiments.spec import ClaimSpec
from lightning_sv.statistics.paired import PairedDifference
from lightning_sv.statistics.verdicts import ALPHA, NOT_RESOLVED, NOT_TESTABLE, Outcome

#: agreement with the paper -> where its number lies
_PLACES = {"consistent": "inside", "not consistent": "outside"}
#: a claim with the verdicts on it
Decided = tuple[ClaimSpec, Sequence[Verdict]]


def evaluate_claim(claim: ClaimSpec, panel: LoadedPanel, figure: Figure) -> list[Verdict]:
    """Decide a claim, or return why its runs or this budget do not test it."""
    try:
        _check_not_skipped(claim, panel, figure.budget)
        results = verdicts(claim, panel, figure.paper_scale)
    except NotTestableError as error:  # the other claims are still decided
        results = [not_testable(claim, error)]
    return [replace(verdict, panel=panel.title) for verdict in results]


def _check_not_skipped(claim: ClaimSpec, panel: LoadedPanel, budget: str) -> None:
    """Check that a budget tests a claim.

    Raises:
        NotTestableError: the reason of the claim, of one of its arms, or of a panel without runs
    """
    if budget in claim.skip_under:
        raise NotTestableError(claim.skip_under[budget])
    for label in claim.arms:
        if label in panel.skipped:
            raise NotTestableError(panel.skipped[label])
    if not panel.is_shown:
        raise NotTestableError(str(panel.why_not))


def verdicts(claim: ClaimSpec, panel: LoadedPanel, paper_scale: bool = False) -> list[Verdict]:
    """Decide a claim by the runs of its own arms.

    There is one verdict per part, and per size unless the claim is about all sizes together.

    Raises:
        NotTestableError: an arm without runs, a slope of one size, or a run without the values of
            the claim
    """
    if not panel.sizes or not KINDS[claim.kind].per_size:
        return _verdicts_of_parts(claim, panel, paper_scale)

    results = []
    errors = []
    for size in panel.sizes:
        at_size = replace(claim, a=point_label(claim.a, size), b=point_label(claim.b, size))
        try:
            results += _verdicts_of_parts(at_size, panel, paper_scale)
        except NotTestableError as error:  # the other sizes are still decided
            errors.append(error)
            results.append(not_testable(at_size, error))
    if len(errors) == len(panel.sizes):
        raise errors[0]
    return results


def _verdicts_of_parts(claim: ClaimSpec, panel: LoadedPanel, paper_scale: bool) -> list[Verdict]:
    own = panel.only(claim.arms)
    _check_crossing(claim, own)
    return [_decide(part, own, paper_scale) for part in KINDS[claim.kind].parts(claim)]


def _check_crossing(claim: ClaimSpec, panel: LoadedPanel) -> None:
    """Check that runs are long enough.

    Raises:
        NotTestableError: they end before A is known to pass B
    """
    lengths = [arm.run_spec.steps for arm in panel.arms if arm.run_spec]
    shortest = min(lengths, default=claim.crossing)
    if shortest < claim.crossing:
        known = f"{claim.a} is known to pass {claim.b} at about {claim.crossing:,}"
        raise NotTestableError(f"runs end after {shortest:,} steps, and {known}")


def statement(claim: ClaimSpec) -> str:
    """Return the statement of a claim."""
    if claim.text:
        return claim.text
    verb = "ends"
    more = f" by more than {claim.margin:g}" if claim.margin else ""
    if claim.until < 1:
        verb = "is"
        more += f" at {claim.until:.0%} of the tokens"
    tags = " and ".join(map(branch_of, claim.tags))
    fields = {**vars(claim), "tags": tags, "more": more, "ends": verb}
    return KINDS[claim.kind].statement.format(**fields)


def not_testable(claim: ClaimSpec, why: NotTestableError) -> Verdict:
    """Return the verdict on a claim that these runs, or this budget, do not test."""
    sentence = f"Not testable here: {str(why).rstrip('.')}."
    return Verdict(statement(claim), NOT_TESTABLE, sentence, paper=claim.paper)


def _decide(claim: ClaimSpec, panel: LoadedPanel, paper_scale: bool) -> Verdict:
    """Decide a claim of one part by the runs of a panel that has only its arms."""
    estimate = KINDS[claim.kind].measure(claim, panel)
    d = estimate.d
    outcome = _outcome(claim, estimate)
    paper_value = None
    if paper_scale and d.has_interval:
        paper_value = claim.paper_value
    agreement = _agreement(d, paper_value)

    details = [estimate.detail, *_diverged_sentences(claim, panel)]
    if agreement:
        details.append(f"the paper's {paper_value:+g} lies {_PLACES[agreement]}")
    own_low, own_high = d.own_interval
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
        p=outcome.p,
        df=d.df,
        paper_value=paper_value,
        agreement=agreement,
        own_low=own_low,
        own_high=own_high,
    )


def _outcome(claim: ClaimSpec, estimate: Estimate) -> Outcome:
    """Test an estimate; p is scaled so that ALPHA is its threshold for any coverage."""
    d = estimate.tested or estimate.d
    if math.isnan(d.se):  # one pair gives no verdict
        return Outcome(NOT_RESOLVED, math.nan)

    margin = claim.margin
    is_ratio = estimate.unit == "times"
    if is_ratio and margin > 0:  # without a margin, the bound is log(1) = 0
        margin = math.log(margin)
    outcome = KINDS[claim.kind].test(d, margin)

    error_of_each_end = (1 - d.confidence) / 2
    p = outcome.p * (ALPHA / error_of_each_end)
    return outcome._replace(p=min(1.0, p))


def _diverged_sentences(claim: ClaimSpec, panel: LoadedPanel) -> list[str]:
    """Return sentences on diverged runs: the remaining ones are selected by their success."""
    sentences = []
    for arm in panel.arms:
        if arm.diverged and arm.label in claim.arms:
            count = len(arm.diverged)
            sentences.append(f"diverged runs of {arm.label}, which are left out: {count}")
    return sentences


def _agreement(d: PairedDifference, paper_value: float | None) -> str:
    """Return whether the interval contains the number of the paper; empty without one."""
    if paper_value is None:
        return ""
    if d.low <= paper_value <= d.high:
        return "consistent"
    return "not consistent"


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
    for claim, results in decided:
        if claim.primary:
            return _last_tested(results)
    for _, results in decided:
        tested = _last_tested(results)
        if tested is not None:
            return tested
    return None


def _last_tested(results: Sequence[Verdict]) -> Verdict | None:
    for verdict in reversed(results):
        if verdict.verdict != NOT_TESTABLE:
            return verdict
    return None
