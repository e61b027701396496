"""The kinds of claims that runs can check: a table, one row each."""

from collections.abc import Callable
from dataclasses import dataclass

from lightning_sv.experiments import decide
from lightning_sv.experiments.judge import Found
from lightning_sv.experiments.results import PanelKind, PanelResult
from lightning_sv.experiments.spec import ClaimSpec, PanelSpec


@dataclass(frozen=True)
class Kind:
    """One kind of claim.

    Args:
        statement: In words, a template.
        judge: What decides it.
        panels: Kinds of panels that can have it.
        needs: What such a claim, or its panel, must say besides; None where it does.
    """

    statement: str
    judge: Callable[[ClaimSpec, PanelResult], Found]
    panels: tuple[PanelKind, ...] = ("curves", "scaling")
    needs: Callable[[ClaimSpec, PanelSpec], str | None] = lambda claim, panel: None


def _two_tags_apart(claim: ClaimSpec, panel: PanelSpec) -> str | None:
    right = len(claim.tags) == 2 and all(tag.count("/") > 1 for tag in claim.tags)
    if right and claim.margin > 0:
        return None
    return f"two tags, e.g. branch_norm/mean/q_proj/effective, and a margin; it has {claim.tags} and {claim.margin:g}"


def _rule(claim: ClaimSpec, panel: PanelSpec) -> str | None:
    return None if panel.rule is not None else "the panel's rule; add margin, pilot and budget"


def _margin(claim: ClaimSpec, panel: PanelSpec) -> str | None:
    return None if claim.margin > 0 else "a margin above 0, e.g. 1.05 times"


#: kinds that one interval in nats per token decides: more pairs would help
SINGLE = ("less", "not_less", "equal")

KINDS: dict[str, Kind] = {
    "less": Kind("{a} ends below {b}{more}", decide.less),
    "not_less": Kind("{a} does not end below {b}{more}", decide.not_less),
    "equal": Kind("{a} ends within {margin:g} of {b}", decide.equal),
    "crosses": Kind("{a} leads {b} at {at:.0%} of the tokens and is overtaken", decide.crosses),
    "leads": Kind("{a} is below {b} at each quarter of the tokens", decide.leads),
    "widens": Kind("the lead of {a} over {b} is larger at {until:.0%} of the tokens than at {at:.0%}", decide.widens),
    "keeps": Kind(
        "{a} leads {b} at {at:.0%} of the tokens, and the lead shrinks by less than {margin:g} after", decide.keeps
    ),
    "efficiency": Kind("{a} reaches the final loss of {b} with fewer tokens", decide.efficiency),
    "apart": Kind(
        "in {a} the norms of {tags} grow or shrink at rates more than {margin:.0%} apart",
        decide.apart,
        ("qkv",),
        _two_tags_apart,
    ),
    "slope": Kind("the loss of {a} falls faster with size than that of {b}", decide.slope, ("scaling",)),
    "grid_gap": Kind(
        "{a} ends below {b}, each at its best value, by more than the grid's error", decide.grid_gap, ("grid",)
    ),
    "decided": Kind(
        "{a} ends below {b} by more than the margin, each at its own best value", decide.decided, ("grid",), _rule
    ),
    "cost": Kind("a step of {a} takes less than {margin:g} times that of {b}", decide.cost, ("table",), _margin),
    "memory": Kind("{a} needs less than {margin:g} times the memory of {b}", decide.memory, ("table",), _margin),
}
