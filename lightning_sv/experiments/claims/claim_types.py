"""Table of the kinds of claims that runs can check."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from lightning_sv.analysis.paired import PairedDifference
from lightning_sv.analysis.verdicts import Finding, directed, directed_or_equal, equivalent, opposite
from lightning_sv.experiments.claims import claim_tests
from lightning_sv.experiments.claims.claim_tests import Estimate
from lightning_sv.experiments.results import Panel
from lightning_sv.experiments.spec import ClaimSpec, PanelKind, PanelSpec

#: test of an estimate with the margin of the claim, in the unit of the estimate; logarithm of a ratio
Test = Callable[[PairedDifference, float], Finding]


def _below(d: PairedDifference, margin: float) -> Finding:
    return directed_or_equal(d, -margin)


def _not_below(d: PairedDifference, margin: float) -> Finding:
    return opposite(directed_or_equal(d, -margin))


def _outside(d: PairedDifference, margin: float) -> Finding:
    return opposite(equivalent(d, margin))


@dataclass(frozen=True)
class ClaimType:
    """One kind of claim.

    Attributes:
        statement: template of the statement
        measure: function that estimates the quantity of the claim from the runs of a panel
        test: one of five: below -margin (or equal), not below it, below +margin, inside or outside +-margin; unused
            if the measure has its own
        panels: kinds of panels that can have the claim
        needs: returns a sentence on the missing key of a claim, else None
        parts: returns the claims of which it consists, each with its own verdict
    """

    statement: str
    measure: Callable[[ClaimSpec, Panel], Estimate]
    test: Test
    panels: tuple[PanelKind, ...] = ("curves", "scaling", "lengths")
    needs: Callable[[ClaimSpec, PanelSpec], str | None] = lambda claim, panel: None
    parts: Callable[[ClaimSpec], tuple[ClaimSpec, ...]] = lambda claim: (claim,)


def _two_tags_apart(claim: ClaimSpec, panel: PanelSpec) -> str | None:
    if len(claim.tags) == 2 and all(tag.count("/") > 1 for tag in claim.tags) and claim.margin > 0:
        return None
    return f"two tags, e.g. branch_norm/mean/q_proj/effective, and a margin; it has {claim.tags} and {claim.margin:g}"


def _margin(claim: ClaimSpec, panel: PanelSpec) -> str | None:
    example = "0.01 nats per token" if claim.kind == "equal" else "1.05 times"
    return None if claim.margin > 0 else f"a margin above 0, e.g. {example}"


def _lower(claim: ClaimSpec, share: float) -> ClaimSpec:
    """Return the claim that A is below B at a share of the tokens, as a part of a claim."""
    return replace(claim, kind="less", until=share, margin=0.0, text=None, paper_value=None)


#: shares of the tokens for the claim `leads`
QUARTERS = (0.25, 0.5, 0.75, 1.0)


#: name in conf/paper -> kind
KINDS: dict[str, ClaimType] = {
    "less": ClaimType("{a} {ends} below {b}{more}", claim_tests.loss, _below),
    "not_less": ClaimType("{a} does not end below {b}{more}", claim_tests.loss, _not_below),
    "equal": ClaimType("{a} ends within {margin:g} of {b}", claim_tests.loss, equivalent, needs=_margin),
    "crosses": ClaimType(
        "{a} leads {b} at {at:.0%} of the tokens and is overtaken",
        claim_tests.loss,
        _below,
        parts=lambda claim: (_lower(claim, claim.at), _lower(replace(claim, a=claim.b, b=claim.a), 1.0)),
    ),
    "leads": ClaimType(
        "{a} is below {b} at each quarter of the tokens",
        claim_tests.loss,
        _below,
        parts=lambda claim: tuple(_lower(claim, share) for share in QUARTERS),
    ),
    "widens": ClaimType(
        "{a} gains on {b} from {at:.0%} to {until:.0%} of the tokens",
        claim_tests.change,
        _below,
        parts=lambda claim: (claim, _lower(claim, claim.until)),
    ),
    "keeps": ClaimType(
        "the lead of {a} over {b} shrinks by less than {margin:g} after {at:.0%} of the tokens",
        claim_tests.change,
        directed,
        parts=lambda claim: (_lower(claim, claim.at), claim),
    ),
    "efficiency": ClaimType("{a} reaches the final loss of {b} with fewer tokens", claim_tests.efficiency, directed),
    "apart": ClaimType(
        "in {a} the norms of {tags} grow or shrink at rates more than {margin:.0%} apart",
        claim_tests.growths_apart,
        _outside,
        ("qkv",),
        _two_tags_apart,
    ),
    "lower": ClaimType(
        "it ends lower in {a} than in {b}",
        lambda claim, panel: claim_tests.ratio(claim, panel, panel.spec.tag, panel.spec.tag, last=True),
        directed,
        ("scalar",),
    ),
    "slope": ClaimType(
        "the loss of {a} falls faster with size than that of {b}", claim_tests.slope, _not_below, panels=("scaling",)
    ),
    "grid_gap": ClaimType(
        "{a} ends below {b}{more}, each at its own optimum", claim_tests.grid_gap, _below, panels=("grid",)
    ),
    "sensitivity": ClaimType(
        "the loss of {a} depends less on the learning rate than that of {b}",
        claim_tests.lr_sensitivity,
        directed,
        ("grid",),
    ),
    "cost": ClaimType(
        "a step of {a} takes less than {margin:g} times that of {b}",
        partial(claim_tests.ratio, what="time of a step", tag="throughput/tokens_per_s", power=-1),
        directed,
        ("table",),
        _margin,
    ),
    "memory": ClaimType(
        "{a} needs less than {margin:g} times the memory of {b}",
        partial(claim_tests.ratio, what="peak memory", tag="memory/peak_gib"),
        directed,
        ("table",),
        _margin,
    ),
}
