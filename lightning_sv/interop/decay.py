"""Weight decay of an optimizer or of a usual rule, compared with a policy."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from lightning_sv.errors import ConfigError, expect
from lightning_sv.interop.groups import trained_parameters
from lightning_sv.own_code import find
from lightning_sv.roles import MODEL_ROLES, ModelParameter, Roles, family
from lightning_sv.roles.table import aligned
from lightning_sv.scale.strategy import DECAYS


class DecayDifference(NamedTuple):
    """A trained parameter that decays now or under the policy, but not both."""

    name: str
    role: str
    decays: bool  #: whether it decays now


@dataclass(frozen=True)
class DecayReport:
    """Decay of each trained parameter, now and under a policy; as text a table, the differing names, and code.

    Attributes:
        policy: 'wd', 'iwd', 'owd' or 'nowd'
        now: name -> (role, whether it decays now)
        differences: parameters whose decay differs from the policy
        without_optimizer: trained parameters that no optimizer updates
        code: Python lines that build the optimizer with the policy
    """

    policy: str
    now: dict[str, tuple[str, bool]]
    differences: tuple[DecayDifference, ...]
    without_optimizer: tuple[str, ...]
    code: str

    def __str__(self) -> str:
        lines = [*self._table(), "", *self._sentences()]
        if self.differences:
            lines += ["", "To change it:", "", *(f"    {line}" for line in self.code.splitlines())]
        return "\n".join(lines)

    def _table(self) -> list[str]:
        tensors = Counter(role for role, _ in self.now.values())
        now = Counter(role for role, decays in self.now.values() if decays)
        expected = now.copy()
        for difference in self.differences:
            expected[difference.role] += -1 if difference.decays else 1
        heading = ("role", "tensors", "decay now", f"decay under {self.policy}")
        used = [role for role in MODEL_ROLES if role in tensors]
        rows = [(role, f"{tensors[role]}", f"{now[role]}", f"{expected[role]}") for role in used]
        return aligned([heading, *rows])

    def _sentences(self) -> list[str]:
        sentences = [f"Not in an optimizer: {label}" for label in _by_family(self.without_optimizer)]
        if not self.differences:
            return [*sentences, f"The optimizer decays what {self.policy} decays."]
        superfluous = [difference.name for difference in self.differences if difference.decays]
        missing = [difference.name for difference in self.differences if not difference.decays]
        sentences += [f"Decays, but not under {self.policy}: {label}" for label in _by_family(superfluous)]
        sentences += [f"Does not decay, but does under {self.policy}: {label}" for label in _by_family(missing)]
        return sentences


def decay_report(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    example: Any = None,
    *,
    policy: str = "iwd",
    roles: Roles | None = None,
) -> DecayReport:
    """Compare the decay of an optimizer's parameters with a policy, by role.

    Args:
        model: any module
        optimizer: optimizer of its parameters, or several, such as Muon and AdamW
        example: example inputs of the model, see `weight_decay_roles`
        policy: 'wd', 'iwd', 'owd' or 'nowd'
        roles: as in `param_groups`

    Raises:
        ConfigError: as `param_groups`, or no parameter of the model is in the optimizer
    """
    find(DECAYS, policy, "policy")  # before the trace, which takes seconds
    optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    rates = _decay_rates(optimizers)
    parameters = trained_parameters(model, example, roles)
    ids = {name: id(parameter) for name, parameter in model.named_parameters()}
    optimized = {name: parameter for name, parameter in parameters.items() if ids[name] in rates}
    if not optimized:
        hint = "Pass the optimizer that was made from model.parameters()."
        raise ConfigError(f"optimizer has no parameter of {type(model).__name__}; expected those of this model. {hint}")
    decayed = {name for name in optimized if rates[ids[name]]}
    return DecayReport(
        policy,
        now={name: (parameter.role, name in decayed) for name, parameter in optimized.items()},
        differences=_differences(optimized, decayed, policy),
        without_optimizer=tuple(name for name in parameters if name not in optimized),
        code=_code(optimizers, policy, has_example=example is not None, has_roles=roles is not None),
    )


def _decay_rates(optimizers: Sequence[Optimizer]) -> dict[int, float]:
    """Return id of a parameter -> its weight decay."""
    usable = bool(optimizers) and all(hasattr(each, "param_groups") for each in optimizers)
    kinds = " ".join(type(each).__name__ for each in optimizers) or "empty"
    expect(usable, "optimizer", kinds, "an optimizer of torch, or a list of them.")
    groups = [group for each in optimizers for group in each.param_groups]
    return {id(parameter): group.get("weight_decay") or 0.0 for group in groups for parameter in group["params"]}


def _differences(parameters: dict[str, ModelParameter], decayed: set[str], policy: str) -> tuple[DecayDifference, ...]:
    return tuple(
        DecayDifference(name, parameter.role, name in decayed)
        for name, parameter in parameters.items()
        if parameter.decays(policy) != (name in decayed)
    )


def _code(optimizers: Sequence[Optimizer], policy: str, *, has_example: bool, has_roles: bool) -> str:
    """Return lines that build the optimizer with the policy, for several with the names to split their groups by."""
    given = ", example=example" if has_example else ""
    given = ", roles=roles" if has_roles else given
    first = optimizers[0]
    if len(optimizers) > 1:
        return (
            "from lightning_sv.interop import decayed_names\n"
            f'decayed = set(decayed_names(model, "{policy}"{given}))\n'
            "# then split the groups of each optimizer: weight_decay=0 for names outside decayed"
        )
    rate = first.param_groups[0].get("lr", 1e-3)
    decay = max(group.get("weight_decay") or 0.0 for group in first.param_groups) or 0.1
    kind = type(first)
    name = f"torch.optim.{kind.__name__}" if kind.__module__.startswith("torch.optim") else kind.__name__
    return (
        "from lightning_sv.interop import param_groups\n"
        f'groups = param_groups(model, lr={rate:g}, weight_decay={decay:g}, policy="{policy}"{given})\n'
        f"optimizer = {name}(groups)  # and its other arguments"
    )


def _by_family(names: Iterable[str]) -> list[str]:
    """Return one label for the parameters of all layers, with their number."""
    counts = Counter(family(name) for name in names)
    return [f"{name} ({count})" if count > 1 else name for name, count in counts.items()]


class UsualRule(NamedTuple):
    """A rule that decides by names, axes or layers which parameters decay."""

    label: str
    decayed: Callable[[nn.Module], set[str]]


def _matrices(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.ndim >= 2}


def _no_norm_or_bias(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters() if not re.search("norm|bias", name.lower())}


def _by_transformers(model: nn.Module) -> set[str]:
    """Return the names that Trainer.get_decay_parameter_names of transformers returns."""
    spared = r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)"
    layer_norms = [path for path, module in model.named_modules() if isinstance(module, nn.LayerNorm)]
    inside = {f"{path}.{name}" for path in layer_norms for name, _ in model.get_submodule(path).named_parameters()}
    names = {name for name, _ in model.named_parameters() if not re.search(spared, name.lower())}
    return names - inside


def _all(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters()}


USUAL_RULES = (
    UsualRule("two or more axes (nanoGPT)", _matrices),
    UsualRule("no norm or bias in the name", _no_norm_or_bias),
    UsualRule("transformers' Trainer", _by_transformers),
    UsualRule("everything (torchtitan)", _all),
)


def rule_differences(model: nn.Module, roles: Roles, policy: str) -> dict[str, tuple[DecayDifference, ...]]:
    """Return rule -> the trained parameters whose decay differs from the policy, for each of `USUAL_RULES`."""
    parameters = {parameter.name: parameter for parameter in roles.parameters if parameter.trained}
    return {rule.label: _differences(parameters, rule.decayed(model), policy) for rule in USUAL_RULES}


def rule_table(differences: dict[str, tuple[DecayDifference, ...]], policy: str) -> str:
    """Return a table of usual rules, with the number of tensors by role that they decay or spare unlike a policy."""
    heading = ("what decays", f"decays, unlike {policy}", f"spares, unlike {policy}")
    rows = [heading]
    for label, rows_of_rule in differences.items():
        superfluous = [row.role for row in rows_of_rule if row.decays]
        missing = [row.role for row in rows_of_rule if not row.decays]
        rows.append((label, _counted(superfluous), _counted(missing)))
    return "\n".join(aligned(rows))


def _counted(roles: Iterable[str]) -> str:
    return ", ".join(f"{count} {role}" for role, count in Counter(roles).items()) or "-"


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
    """Return Python lines that split the parameters of a model by regular expressions, without this package.

    `patterns` is not empty: no pattern matches every name.
    """
    return _TWO_GROUPS.format(patterns="\n".join(f"    {pattern!r}," for pattern in patterns))
