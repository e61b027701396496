"""Weight decay of an optimizer, compared with a policy.

decays now          optimizer.param_groups, by the id of each parameter
should decay        the role of each parameter, and the policy
difference          both ways, by family of names
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from lightning_sv.errors import ConfigError, expect
from lightning_sv.interop.groups import applied_policy, trained_parameters
from lightning_sv.own_code import find
from lightning_sv.roles import MODEL_ROLES, ModelParameter, Roles, family
from lightning_sv.roles.table import aligned
from lightning_sv.roles.types import decayed_roles
from lightning_sv.scale.strategy import DECAYS


class DecayDifference(NamedTuple):
    """A trained parameter that decays now or under the policy, but not both."""

    name: str
    role: str
    decays: bool  #: whether it decays now


@dataclass(frozen=True)
class DecayReport:
    """Decay of each trained parameter, now and under a policy.

    As text a table and the differing names.

    Attributes:
        policy: 'wd', 'iwd', 'owd' or 'nowd'
        now: name -> (role, whether it decays now)
        differences: parameters whose decay differs from the policy
        without_optimizer: trained parameters that no optimizer updates
    """

    policy: str
    now: dict[str, tuple[str, bool]]
    differences: tuple[DecayDifference, ...]
    without_optimizer: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([*self._table(), "", *self._sentences()])

    def _table(self) -> list[str]:
        tensors = Counter(role for role, _ in self.now.values())
        now = Counter(role for role, decays in self.now.values() if decays)
        decayed = decayed_roles(self.policy)
        rows = [("role", "tensors", "decay now", f"decay under {self.policy}")]
        for role in MODEL_ROLES:
            count = tensors[role]
            expected = count if role in decayed else 0
            if count:
                rows.append((role, f"{count}", f"{now[role]}", f"{expected}"))
        return aligned(rows)

    def _sentences(self) -> list[str]:
        superfluous = [row.name for row in self.differences if row.decays]
        missing = [row.name for row in self.differences if not row.decays]
        sentences = [
            *_by_family("Not in an optimizer", self.without_optimizer),
            *_by_family(f"Decays, but not under {self.policy}", superfluous),
            *_by_family(f"Does not decay, but does under {self.policy}", missing),
        ]
        if self.without_optimizer:
            number = len(self.without_optimizer)
            hint = "Make the optimizer after apply_strategy, from param_groups."
            sentences.append(f"{number} trained tensors are in no optimizer. {hint}")
        if self.differences:
            hint = f"make the optimizer from param_groups(..., policy={self.policy!r})."
            sentences.append(f"To follow {self.policy}, {hint}")
        elif not self.without_optimizer:
            sentences.append(f"The optimizer decays what {self.policy} decays.")
        return sentences


def _by_family(what: str, names: Iterable[str]) -> Iterator[str]:
    """Yield one sentence for the parameters of all layers, with their number."""
    for name, count in Counter(map(family, names)).items():
        number = f" ({count})" if count > 1 else ""
        yield f"{what}: {name}{number}"


def decay_report(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    example: Any = None,
    *,
    policy: str | None = None,
    roles: Roles | None = None,
) -> DecayReport:
    """Compare the decay of an optimizer's parameters with a policy, by role.

    Args:
        model: any module
        optimizer: optimizer of its parameters, or several, such as Muon and AdamW
        example: example inputs of the model, see `weight_decay_roles`
        policy: as in `param_groups`, so that groups made without a policy agree with the report
        roles: as in `param_groups`

    Raises:
        ConfigError: as `param_groups`, or no parameter of the model is in the optimizer
    """
    if policy is None:
        policy = applied_policy(model)
    find(DECAYS, policy, "policy")  # before the trace, which takes seconds
    optimizers = optimizer if isinstance(optimizer, Sequence) else [optimizer]
    decays = _decays_by_id(optimizers)
    parameters = trained_parameters(model, example, roles)

    optimized: dict[str, ModelParameter] = {}
    now: dict[str, tuple[str, bool]] = {}
    for name, row in parameters.items():
        decay = decays.get(id(model.get_parameter(name)))
        if decay is not None:
            optimized[name] = row
            now[name] = row.role, decay
    if not optimized:
        name = type(model).__name__
        wanted = "those of this model. Pass the optimizer that was made from model.parameters()."
        raise ConfigError(f"optimizer has no parameter of {name}; expected {wanted}")

    return DecayReport(
        policy,
        now=now,
        differences=tuple(_differences(policy, optimized, now)),
        without_optimizer=tuple(name for name in parameters if name not in now),
    )


def _decays_by_id(optimizers: Sequence[Optimizer]) -> dict[int, bool]:
    """Return id of a parameter -> whether it decays."""
    kinds = " ".join(type(optimizer).__name__ for optimizer in optimizers) or "empty"
    usable = bool(optimizers) and all(hasattr(each, "param_groups") for each in optimizers)
    expect(usable, "optimizer", kinds, "an optimizer of torch, or a list of them.")
    decays: dict[int, bool] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            ids = map(id, group["params"])
            decays |= dict.fromkeys(ids, bool(group.get("weight_decay")))
    return decays


def _differences(
    policy: str, parameters: dict[str, ModelParameter], now: dict[str, tuple[str, bool]]
) -> Iterator[DecayDifference]:
    """Yield the parameters whose decay now differs from a policy."""
    for name, parameter in parameters.items():
        role, decays = now[name]
        if decays != parameter.decays(policy):
            yield DecayDifference(name, role, decays)
