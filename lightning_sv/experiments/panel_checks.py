"""Checks of a panel of conf/paper that do not depend on the budget.

Each check raises a `ConfigError` without the place of the panel, which the planner adds.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import chain

from lightning_sv.errors import ConfigError, expect, expect_known
from lightning_sv.experiments.claims.claim_types import KINDS as CLAIMS
from lightning_sv.experiments.claims.claim_types import OPTIONAL_KEYS
from lightning_sv.experiments.kinds.base import KINDS
from lightning_sv.experiments.spec import ArmSpec, Axes, ClaimSpec, PanelSpec


def check_panel(panel: PanelSpec) -> None:
    """Check the kind, the claims, the fields and the arms of a panel."""
    expect_known("kind", panel.kind, KINDS)
    expect(bool(panel.arms), "arms", "empty", "one or more.")
    for claim in panel.claims:
        expect_known("claim of kind", claim.kind, CLAIMS)
        _check_claim(claim, panel)
    _check_fields_are_read(panel)
    _check_values(panel.axes)
    for label, arm in panel.arms.items():
        _check_arm(f"arm {label!r}", arm, panel)
    baselines = [label for label, arm in panel.arms.items() if arm.baseline]
    if len(baselines) > 1:
        marked = " and ".join(baselines)
        raise ConfigError(f"`baseline: true` is set for {marked}; expected one arm.")
    KINDS[panel.kind].check(panel)


def _check_claim(claim: ClaimSpec, panel: PanelSpec) -> None:
    name = f"claim {claim.kind!r}"
    kinds = [kind for kind, rules in KINDS.items() if claim.kind in rules.claims]
    expected = f"{' or '.join(kinds)}, because it has a {name}."
    expect(panel.kind in kinds, "kind", repr(panel.kind), expected)
    _check_compared_arms(claim, panel, name)
    _check_keys_are_read(claim, name)
    _check_shares(claim, name)
    if CLAIMS[claim.kind].needs_margin:
        expect(claim.margin > 0, f"margin of a {name}", claim.margin, "a number above 0.")


def _check_keys_are_read(claim: ClaimSpec, name: str) -> None:
    """Check that the kind of a claim reads the keys that only some kinds read."""
    unset = ClaimSpec(claim.kind, a=claim.a)
    for key in OPTIONAL_KEYS:
        value = getattr(claim, key)
        is_set = value != getattr(unset, key)
        is_read = key in CLAIMS[claim.kind].keys
        expect(is_read or not is_set, f"{key} of a {name}", value, "no value. Remove it.")


def _check_compared_arms(claim: ClaimSpec, panel: PanelSpec, name: str) -> None:
    expect_known(f"{name}: arm", claim.a, panel.arms)
    if CLAIMS[claim.kind].compares:
        expect_known(f"{name}: arm", claim.b, panel.arms)
        expect(claim.a != claim.b, f"a and b of {name}", repr(claim.a), "two arms.")


def _check_shares(claim: ClaimSpec, name: str) -> None:
    expected = "a share of the tokens, above 0 and at most 1."
    expect(0 < claim.until <= 1, f"{name}: until", claim.until, expected)
    if "at" in CLAIMS[claim.kind].keys:
        expected = f"above 0 and below until, which is {claim.until:g}."
        expect(0 < claim.at < claim.until, f"{name}: at", claim.at, expected)


def _check_fields_are_read(panel: PanelSpec) -> None:
    """Check that the kind of a panel reads the fields that only some kinds read."""
    optional = chain.from_iterable(kind.fields for kind in KINDS.values())
    expected = f"no value, because kind is {panel.kind!r}. Remove it, or change kind."
    for field in set(optional).difference(KINDS[panel.kind].fields):
        value = getattr(panel, field)
        expect(not value, field, value, expected)


def _check_arm(name: str, arm: ArmSpec, panel: PanelSpec) -> None:
    if not KINDS[panel.kind].arms_have_models:
        expected = "none, because the panel has its models."
        expect(arm.model is None, f"model of {name}", arm.model, expected)
    _check_rate(name, arm, panel)
    _check_length(name, arm)
    _check_values(arm.axes)
    for key, by_budget in arm.axes.items():
        expected = "an axis of the panel under the same budgets. Set a single value in 'overrides'."
        is_swept = by_budget.keys() <= panel.axes.get(key, {}).keys()
        expect(is_swept, f"axes of {name}", key, expected)


def _check_rate(name: str, arm: ArmSpec, panel: PanelSpec) -> None:
    has_rate = bool(panel.lr or arm.lr)
    has_key = "model.optim.lr" in {*panel.overrides, *arm.overrides, *panel.axes}
    if has_rate and has_key:
        expected = "none, because model.optim.lr is set too. Remove one."
        raise ConfigError(f"lr of {name} is set; expected {expected}")


def _check_length(name: str, arm: ArmSpec) -> None:
    for key in ("trainer.max_steps", "model.tokens_per_param"):
        expected = "none. Set 'longer' of the arm, or the key for the panel."
        expect(key not in arm.overrides, f"{key} of {name}", arm.overrides.get(key), expected)


def _check_values(axes: Axes) -> None:
    """Check the values of the axes under each budget."""
    for key, by_budget in axes.items():
        for values in by_budget.values():
            check_axes({key: values})


def check_axes(axes: Mapping[str, Sequence[float]]) -> None:
    """Check that a fit over the logarithms of the values of a grid is possible."""
    for key, values in axes.items():
        is_positive = all(0 < value < math.inf for value in values)
        is_distinct = 0 < len(set(values)) == len(values)
        expected = "one or more different positive numbers, for a fit over their logarithms."
        expect(is_positive and is_distinct, f"axis {key}", values, expected)
