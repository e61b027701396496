"""Errors in a panel of conf/paper that do not depend on the budget, each as one sentence."""

import math
from collections.abc import Iterator, Mapping, Sequence

from lightning_sv.errors import unknown
from lightning_sv.experiments.claims.claim_types import KINDS as CLAIMS
from lightning_sv.experiments.kinds.base import KINDS
from lightning_sv.experiments.spec import ArmSpec, Axes, ClaimSpec, PanelSpec


def panel_errors(panel: PanelSpec) -> Iterator[str]:
    """Yield the errors; a caller that reports one may stop after the first."""
    if panel.kind not in KINDS:
        yield unknown("kind", panel.kind, list(KINDS))
        return
    for claim in panel.claims:
        if claim.kind not in CLAIMS:
            yield unknown("claim of kind", claim.kind, list(CLAIMS))
            return
        yield from _claim_errors(claim, panel)
    yield from _unread_fields(panel)
    for label, arm in panel.arms.items():
        yield from _arm_errors(f"arm {label!r}", arm, panel)
        yield from _values_errors(arm.axes)
    yield from _values_errors(panel.axes)
    marked = [label for label, arm in panel.arms.items() if arm.baseline]
    if len(marked) > 1:
        yield f"`baseline: true` is set for {' and '.join(marked)}; expected one arm."
    yield from KINDS[panel.kind].problems(panel)


def _claim_errors(claim: ClaimSpec, panel: PanelSpec) -> Iterator[str]:
    name = f"claim {claim.kind!r}"
    kinds = [kind for kind, rules in KINDS.items() if claim.kind in rules.claims]
    if panel.kind not in kinds:
        expected = f"{' or '.join(kinds)}, because it has a {name}"
        yield f"kind is {panel.kind!r}; expected {expected}."
    yield from _compared_arm_errors(claim, panel, name)
    yield from _share_errors(claim, name)

    claim_type = CLAIMS[claim.kind]
    takes_margin = "margin" in claim_type.statement or "{more}" in claim_type.statement
    if claim.margin and not takes_margin:
        yield f"margin of a {name} is {claim.margin:g}; expected none."
    lacking = claim_type.needs(claim, panel)
    if lacking is not None:
        yield f"a {name} needs {lacking}."


def _compared_arm_errors(claim: ClaimSpec, panel: PanelSpec, name: str) -> Iterator[str]:
    labels = [claim.a]
    if "{b}" in CLAIMS[claim.kind].statement:
        labels.append(claim.b)
    for label in labels:
        if label not in panel.arms:
            yield unknown(f"{name}: arm", label, list(panel.arms))
    if len(set(labels)) < len(labels):
        yield f"a and b of {name} are both {claim.a!r}; expected two arms."


def _share_errors(claim: ClaimSpec, name: str) -> Iterator[str]:
    for key, share in (("at", claim.at), ("until", claim.until)):
        if not 0 < share <= 1:
            expected = "a share of the tokens, above 0 and at most 1"
            yield f"{name}: {key} is {share:g}; expected {expected}."
    has_two_shares = "{at" in CLAIMS[claim.kind].statement
    if has_two_shares and claim.at >= claim.until:
        yield f"{name}: at is {claim.at:g}; expected less than until, which is {claim.until:g}."


def _unread_fields(panel: PanelSpec) -> Iterator[str]:
    """Yield errors: fields that some kinds read, and that of the panel does not."""
    readers: dict[str, list[str]] = {}
    for name, kind in KINDS.items():
        for field in kind.fields:
            readers.setdefault(field, []).append(name)
    for field, kinds in readers.items():
        is_read = panel.kind in kinds
        if getattr(panel, field) and not is_read:
            found = f"{field} is set and kind is {panel.kind!r}"
            yield f"{found}; expected kind {' or '.join(kinds)}. Remove {field}, or change kind."


def _arm_errors(name: str, arm: ArmSpec, panel: PanelSpec) -> Iterator[str]:
    if arm.model is not None and not KINDS[panel.kind].arms_have_models:
        expected = "none, because the panel has its models"
        yield f"model of {name} is {arm.model}; expected {expected}."
    yield from _rate_errors(name, arm, panel)
    yield from _length_errors(name, arm)
    for key in arm.axes.keys() - panel.axes.keys():
        expected = "an axis of the panel. Set a single value in 'overrides'"
        yield f"axes of {name} is {key}; expected {expected}."


def _rate_errors(name: str, arm: ArmSpec, panel: PanelSpec) -> Iterator[str]:
    rate_is_set = "model.optim.lr" in {*panel.overrides, *arm.overrides, *panel.axes}
    if rate_is_set and (panel.lr or arm.lr):
        expected = "none, because model.optim.lr is set too. Remove one"
        yield f"lr of {name} is set; expected {expected}."


def _length_errors(name: str, arm: ArmSpec) -> Iterator[str]:
    has_steps = "trainer.max_steps" in arm.overrides
    if "model.tokens_per_param" in arm.overrides and not has_steps:
        expected = "none. Set 'longer' or trainer.max_steps"
        yield f"model.tokens_per_param of {name} is set; expected {expected}."
    if arm.longer != 1 and has_steps:
        expected = "none, because its trainer.max_steps is set"
        yield f"longer of {name} is {arm.longer:g}; expected {expected}."


def _values_errors(axes: Axes) -> Iterator[str]:
    """Yield errors in the values of the axes under each budget."""
    for key, by_budget in axes.items():
        for values in by_budget.values():
            yield from axis_errors({key: values})


def axis_errors(axes: Mapping[str, Sequence[float]]) -> Iterator[str]:
    """Yield errors: values of a grid that no fit over their logarithms can have."""
    for key, values in axes.items():
        is_positive = all(0 < value < math.inf for value in values)
        if not is_positive or len(set(values)) < len(values):
            expected = "different positive numbers, for a fit over their logarithms"
            yield f"axis {key} is {values}; expected {expected}."
