"""Usual rules of weight decay, compared with a policy, and patterns as Python code.

Training code mostly decides by names or axes, and each rule misses something: a scale vector may be
called `w`, one of stacked experts has two axes, and an embedding has two as well.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import nn

from lightning_sv.interop.decay import DecayDifference, differences_from
from lightning_sv.roles import Roles
from lightning_sv.roles.table import aligned

_NORM_OR_BIAS = re.compile(r"norm|bias")
#: names that Trainer.get_decay_parameter_names of transformers excludes
_SPARED_BY_TRANSFORMERS = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


class UsualRule(NamedTuple):
    """A rule that decides by names, axes or layers which parameters decay."""

    label: str
    decayed: Callable[[nn.Module], set[str]]


def _matrices(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.ndim >= 2}


def _no_norm_or_bias(model: nn.Module) -> set[str]:
    return _unmatched(_NORM_OR_BIAS, _all(model))


def _by_transformers(model: nn.Module) -> set[str]:
    """Return the names that Trainer.get_decay_parameter_names of transformers returns."""
    inside: set[str] = set()
    for path, module in model.named_modules():
        if isinstance(module, nn.LayerNorm):
            inside.update(f"{path}.{name}" for name, _ in module.named_parameters())
    return _unmatched(_SPARED_BY_TRANSFORMERS, _all(model) - inside)


def _all(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters()}


def _unmatched(pattern: re.Pattern[str], names: Iterable[str]) -> set[str]:
    """Return the names in which a pattern is not found, in lower case."""
    return {name for name in names if not pattern.search(name.lower())}


USUAL_RULES = (
    UsualRule("two or more axes (nanoGPT)", _matrices),
    UsualRule("no norm or bias in the name", _no_norm_or_bias),
    UsualRule("transformers' Trainer", _by_transformers),
    UsualRule("everything (torchtitan)", _all),
)


def rule_differences(
    model: nn.Module, roles: Roles, policy: str
) -> dict[str, tuple[DecayDifference, ...]]:
    """Return rule -> the trained parameters whose decay differs from the policy."""
    trained = {parameter.name: parameter for parameter in roles.parameters if parameter.trained}
    differences = {}
    for rule in USUAL_RULES:
        differences[rule.label] = differences_from(policy, trained, rule.decayed(model))
    return differences


def rule_table(differences: dict[str, tuple[DecayDifference, ...]], policy: str) -> str:
    """Return a table of usual rules, with the tensors by role that differ from a policy."""
    rows = [("what decays", f"decays, unlike {policy}", f"spares, unlike {policy}")]
    for label, differing in differences.items():
        superfluous = _counted(differing, decays=True)
        missing = _counted(differing, decays=False)
        rows.append((label, superfluous, missing))
    return "\n".join(aligned(rows))


def _counted(differences: Iterable[DecayDifference], *, decays: bool) -> str:
    """Return how many tensors per role decay now, or are spared now."""
    counts = Counter(row.role for row in differences if row.decays == decays)
    return ", ".join(f"{count} {role}" for role, count in counts.items()) or "-"


_TWO_GROUPS = """import re

SPARED = re.compile("|".join([
{patterns}
]))


def groups(model, weight_decay):
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    decayed = [p for n, p in trained if not SPARED.search(n)]
    spared = [p for n, p in trained if SPARED.search(n)]
    return [
        {{"params": decayed, "weight_decay": weight_decay}},
        {{"params": spared, "weight_decay": 0.0}},
    ]"""


def groups_code(patterns: Iterable[str]) -> str:
    """Return Python lines that split the parameters of a model, without this package.

    `patterns` is not empty: no pattern matches every name.
    """
    return _TWO_GROUPS.format(patterns="\n".join(f"    {pattern!r}," for pattern in patterns))
