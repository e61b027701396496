"""The kinds of claims that runs can check: a table, one row each; what a figure may ask of them, and their verdicts."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from lightning_sv.analysis.paired import PairedDifference
from lightning_sv.analysis.verdicts import (
    ALPHA,
    NOT_RESOLVED,
    NOT_TESTABLE,
    Finding,
    directed,
    directed_or_equal,
    equivalent,
    opposite,
)
from lightning_sv.errors import ConfigError, NotTestableError, unknown
from lightning_sv.experiments.claims import claim_tests
from lightning_sv.experiments.claims.verdict import Estimate, Verdict
from lightning_sv.experiments.results import Panel
from lightning_sv.experiments.spec import ClaimSpec, PanelKind, PanelSpec

TestName = Literal["below", "below or equal", "not below", "within", "outside"]
#: tests of an estimate with its standard error against a bound, or against both signs of it
TESTS: dict[TestName, Callable[[PairedDifference, float], Finding]] = {
    "below": directed,
    "below or equal": directed_or_equal,
    "not below": lambda d, bound: opposite(directed_or_equal(d, bound)),
    "within": equivalent,
    "outside": lambda d, margin: opposite(equivalent(d, margin)),
}


@dataclass(frozen=True)
class ClaimType:
    """One kind of claim.

    Args:
        statement: in words, a template
        measure: what it is about, from the runs of a panel
        test: key of `TESTS`
        bound: that the estimate is tested against, in its unit
        panels: kinds of panels that can have it
        needs: what such a claim, or its panel, must say besides; None where it does
        parts: the claims that it is made of, each judged by itself
    """

    statement: str
    measure: Callable[[ClaimSpec, Panel], Estimate]
    test: TestName
    bound: Callable[[ClaimSpec], float] = lambda claim: -claim.margin
    panels: tuple[PanelKind, ...] = ("curves", "scaling", "lengths")
    needs: Callable[[ClaimSpec, PanelSpec], str | None] = lambda claim, panel: None
    parts: Callable[[ClaimSpec], tuple[ClaimSpec, ...]] = lambda claim: (claim,)


def _two_tags_apart(claim: ClaimSpec, panel: PanelSpec) -> str | None:
    right = len(claim.tags) == 2 and all(tag.count("/") > 1 for tag in claim.tags)
    if right and claim.margin > 0:
        return None
    return f"two tags, e.g. branch_norm/mean/q_proj/effective, and a margin; it has {claim.tags} and {claim.margin:g}"


def _margin(claim: ClaimSpec, panel: PanelSpec) -> str | None:
    example = "0.01 nats per token" if claim.kind == "equal" else "1.05 times"
    return None if claim.margin > 0 else f"a margin above 0, e.g. {example}"


def _lower(claim: ClaimSpec, share: float) -> ClaimSpec:
    """That A is below B at a share of the tokens: the part of a claim that says more."""
    return replace(claim, kind="less", until=share, margin=0.0, text=None, paper_value=None)


#: of the training, for a lead that is kept throughout
QUARTERS = (0.25, 0.5, 0.75, 1.0)


def _zero(claim: ClaimSpec) -> float:
    return 0.0


def _plus(claim: ClaimSpec) -> float:
    return claim.margin


def _log(claim: ClaimSpec) -> float:
    return math.log(claim.margin or 1.0)


KINDS: dict[str, ClaimType] = {
    "less": ClaimType("{a} {ends} below {b}{more}", claim_tests.loss, "below or equal"),
    "not_less": ClaimType("{a} does not end below {b}{more}", claim_tests.loss, "not below"),
    "equal": ClaimType(
        "{a} ends within {margin:g} of {b}", claim_tests.loss_and_tokens, "within", _plus, needs=_margin
    ),
    "crosses": ClaimType(
        "{a} leads {b} at {at:.0%} of the tokens and is overtaken",
        claim_tests.loss,
        "below or equal",
        parts=lambda claim: (_lower(claim, claim.at), _lower(replace(claim, a=claim.b, b=claim.a), 1.0)),
    ),
    "leads": ClaimType(
        "{a} is below {b} at each quarter of the tokens",
        claim_tests.loss,
        "below or equal",
        parts=lambda claim: tuple(_lower(claim, share) for share in QUARTERS),
    ),
    "widens": ClaimType(
        "{a} gains on {b} from {at:.0%} to {until:.0%} of the tokens",
        claim_tests.change,
        "below or equal",
        _zero,
        parts=lambda claim: (claim, _lower(claim, claim.until)),
    ),
    "keeps": ClaimType(
        "the lead of {a} over {b} shrinks by less than {margin:g} after {at:.0%} of the tokens",
        claim_tests.change,
        "below",
        _plus,
        parts=lambda claim: (_lower(claim, claim.at), claim),
    ),
    "efficiency": ClaimType(
        "{a} reaches the final loss of {b} with fewer tokens", claim_tests.efficiency, "below", _zero
    ),
    "apart": ClaimType(
        "in {a} the norms of {tags} grow or shrink at rates more than {margin:.0%} apart",
        claim_tests.growths_apart,
        "outside",
        _plus,
        ("qkv",),
        _two_tags_apart,
    ),
    "lower": ClaimType(
        "it ends lower in {a} than in {b}",
        lambda claim, panel: claim_tests.ratio(claim, panel, panel.spec.tag, panel.spec.tag, last=True),
        "below",
        _zero,
        ("scalar",),
    ),
    "slope": ClaimType(
        "the loss of {a} falls faster with size than that of {b}", claim_tests.slope, "not below", panels=("scaling",)
    ),
    "grid_gap": ClaimType(
        "{a} ends below {b}{more}, each at its own optimum", claim_tests.grid_gap, "below or equal", panels=("grid",)
    ),
    "cost": ClaimType(
        "a step of {a} takes less than {margin:g} times that of {b}",
        partial(claim_tests.ratio, what="time of a step", tag="throughput/tokens_per_s", power=-1),
        "below",
        _log,
        ("table",),
        _margin,
    ),
    "memory": ClaimType(
        "{a} needs less than {margin:g} times the memory of {b}",
        partial(claim_tests.ratio, what="peak memory", tag="memory/peak_gib"),
        "below",
        _log,
        ("table",),
        _margin,
    ),
}


def check_claims(panel: PanelSpec, where: str) -> None:
    """Refuse a claim that no run of the panel could decide, or settings that it does not have, before any is trained.

    Args:
        panel: as in the YAML
        where: names it to the user

    Raises:
        ConfigError: an unknown kind or arm, one arm twice, a share of the tokens that is none, a kind that such a panel
            does not have, or one without what it needs
    """
    for claim in panel.claims:
        if claim.kind not in KINDS:
            raise ConfigError(unknown(f"{where}: claim of kind", claim.kind, list(KINDS)))
        kind = KINDS[claim.kind]
        if panel.kind not in kind.panels:
            kinds = " or ".join(kind.panels)
            raise ConfigError(
                f"{where}: a claim {claim.kind!r} needs a panel of kind {kinds}, this one is {panel.kind!r}."
            )
        for label in [claim.a, claim.b] if "{b}" in kind.statement else [claim.a]:
            if label not in panel.arms:
                raise ConfigError(unknown(f"{where}: claim {claim.kind!r}: arm", label, list(panel.arms)))
        if claim.a == claim.b and "{b}" in kind.statement:
            raise ConfigError(f"{where}: claim {claim.kind!r} compares {claim.a!r} with itself; a and b are two arms.")
        for key, share in (("at", claim.at), ("until", claim.until)):
            if not 0 < share <= 1:
                raise ConfigError(
                    f"{where}: claim {claim.kind!r}: {key} is {share:g}; a share of the tokens is over 0 and up to 1."
                )
        if lacking := kind.needs(claim, panel):
            raise ConfigError(f"{where}: a claim {claim.kind!r} needs {lacking}.")
    if (panel.kind == "scalar") != bool(panel.tag):
        says = f"its tag is {panel.tag!r}" if panel.tag else "it names no tag"
        raise ConfigError(
            f"{where}: {says} and its kind is {panel.kind!r}; the kind 'scalar' and a tag, e.g. "
            "sharpness/all/lambda_max, go together."
        )
    own = {label: key for label, arm in panel.arms.items() for key in arm.axes if key not in panel.axes}
    for label, key in own.items():
        raise ConfigError(
            f"{where}: arm {label!r} has values of {key}, which the panel does not vary; set the key of one run "
            "under 'set'."
        )


def verdicts(claim: ClaimSpec, panel: Panel) -> list[Verdict]:
    """Verdicts on a claim that was checked: one a part, and on a scaling panel one a size where it is about two arms.

    Raises:
        NotTestableError: one size, and the claim is about a slope; or a run has not logged what the claim is about
    """
    if claim.kind == "slope" and len(panel.sizes) < 2:
        raise NotTestableError("one size gives no slope")
    each_size = [replace(claim, a=f"{claim.a}, {s}", b=f"{claim.b}, {s}") for s in panel.sizes]
    found = []
    for each in each_size if each_size and claim.kind != "slope" else [claim]:
        if why := _ends_early(each, panel):
            found.append(not_testable(each, why))
        else:
            found += [_verdict(part, panel) for part in KINDS[claim.kind].parts(each)]
    return found


def _ends_early(claim: ClaimSpec, panel: Panel) -> str:
    """Why runs say nothing of A: they end where it is known to be behind still. Empty if they are long enough."""
    if not claim.crossing:
        return ""
    arms = panel.arms if claim.kind == "slope" else [panel.arm(claim.a), panel.arm(claim.b)]
    steps = min((arm.run_spec.steps for arm in arms if arm.run_spec), default=claim.crossing)
    known = f"{claim.a} is known to pass {claim.b} at about {claim.crossing:,}"
    return f"runs end after {steps:,} steps, and {known}" if steps < claim.crossing else ""


def statement(claim: ClaimSpec) -> str:
    """The claim in words."""
    tags = " and ".join(tag.split("/")[-2] for tag in claim.tags)
    more = f" by more than {claim.margin:g}" if claim.margin else ""
    late = claim.until == 1
    words = {"tags": tags, "more": more if late else f"{more} at {claim.until:.0%} of the tokens"}
    words["ends"] = "ends" if late else "is"
    return claim.text or KINDS[claim.kind].statement.format(**(vars(claim) | words))


def not_testable(claim: ClaimSpec, why: str) -> Verdict:
    """The verdict on what these runs, or this budget, cannot show."""
    sentence = f"Not testable here: {why}."
    return Verdict(statement(claim), NOT_TESTABLE, sentence, None, None, None, 0, None, claim.paper)


def _verdict(claim: ClaimSpec, panel: Panel) -> Verdict:
    kind = KINDS[claim.kind]
    d, detail, unit, part, sides, tested, finding = kind.measure(claim, panel)
    word, p, to_go = finding or TESTS[kind.test](tested or d, kind.bound(claim))
    word = word if d.se is not None else NOT_RESOLVED  # never a verdict from one run
    p *= 2 * ALPHA / (1 - d.confidence)  # below ALPHA where the interval, whose error is its own, decides
    hint = f"; {to_go}" if word == NOT_RESOLVED and to_go else ""
    return Verdict(
        claim=statement(claim),
        verdict=word,
        sentence=f"{word.capitalize()}: {detail}{hint}.",
        estimate=d.mean,
        low=d.low,
        high=d.high,
        n=d.n,
        smallest=d.smallest_resolvable,
        paper=claim.paper,
        unit=unit,
        confidence=d.confidence,
        part=part,
        p=min(1.0, p) if d.se is not None else None,
        df=d.df,
        paper_value=claim.paper_value,
        sides=sides,
    )


def with_papers_number(verdict: Verdict, papers_own: bool) -> Verdict:
    """A verdict that says whether its interval holds the paper's number, where runs are of its models and tokens."""
    value, low, high = verdict.paper_value, verdict.low, verdict.high
    if not papers_own or value is None or low is None or high is None:
        return replace(verdict, paper_value=None)
    inside = low <= value <= high
    words = f"{verdict.sentence[:-1]}; the paper's {value:+g} lies {'inside' if inside else 'outside'}."
    return replace(verdict, sentence=words, agreement="consistent" if inside else "not consistent")
