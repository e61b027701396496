"""Role of every parameter of any module, from one traced forward pass and not from its name."""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from lightning_sv.errors import ConfigError
from lightning_sv.roles.classify import Classifier
from lightning_sv.roles.example_inputs import example_of
from lightning_sv.roles.trace import place
from lightning_sv.roles.types import MODEL_ROLES, ModelParameter, ModelRole, Roles


def weight_decay_roles(model: nn.Module, example: Any = None, known: Mapping[str, ModelRole] | None = None) -> Roles:
    """Classify every parameter of `model` from one forward pass.

    Args:
        model: any module; on fake tensors (see `fake_model`) nothing is computed and no memory is used. Build it with
            its head: a final norm without a consumer is not an Input-Norm
        example: inputs of the model: a tensor, a tuple or a dict of keywords. By default 16 token ids for our
            Backbone and for transformers models
        known: roles by parameter name, which take precedence over the trace

    Raises:
        ConfigError: the pass failed, it is unknown whether an operation is linear, or no token reached a parameter and
            its siblings (names that differ only in numbers) disagree; the message names it
    """
    return traced_roles(model, example, known, every=True)[1]


def traced_roles(
    model: nn.Module, example: Any = None, known: Mapping[str, ModelRole] | None = None, *, every: bool = False
) -> tuple[Classifier, Roles]:
    """Return the trace and the roles of `weight_decay_roles`.

    Unless `every` is True, vectors that the pass does not use, such as mask tokens, have the role 'other'.

    Raises:
        ConfigError: as `weight_decay_roles`
    """
    args, kwargs = example_of(model, example)
    known = dict(known or {})
    named = dict(model.named_parameters())
    for name, role in known.items():
        if name not in named or role not in MODEL_ROLES:
            reason = (
                f"the role is {role!r}; expected one of {' '.join(MODEL_ROLES)}"
                if name in named
                else "no such parameter"
            )
            raise ConfigError(f"known[{name!r}]: {reason}.")
    classifier = Classifier(model, args, kwargs, known)
    parameters = classifier.parameters()
    _complete(parameters, named, every=every)
    return classifier, Roles(tuple(parameters[name] for name in named))


def _complete(found: dict[str, ModelParameter], named: Mapping[str, nn.Parameter], *, every: bool) -> None:
    """Assign the role of their siblings to parameters without tokens."""
    siblings: dict[str, list[ModelParameter]] = defaultdict(list)
    for row in found.values():
        siblings[family(row.name)].append(row)
    agreed = {
        name: rows[0] for name, rows in siblings.items() if len({(r.role, r.redundant, r.decays_to) for r in rows}) == 1
    }
    for name, parameter in named.items():
        if name in found:
            continue
        if (like := agreed.get(family(name))) is not None:
            found[name] = replace(like, name=name, shape=tuple(parameter.shape), trained=parameter.requires_grad)
        elif not parameter.requires_grad:
            found[name] = ModelParameter(name, tuple(parameter.shape), "other", trained=False)
        elif (twin := _twin(name, named)) is not None:
            raise ConfigError(
                f"parameter {name} shares its storage with {twin} but is a different parameter, so an optimizer would "
                f"update the same values twice; tie the modules with one parameter: {twin} = {name}, without "
                "nn.Parameter(...) or .data."
            )
        elif not every and max(parameter.shape, default=1) == parameter.numel():
            found[name] = ModelParameter(name, tuple(parameter.shape), "other")
        else:
            raise ConfigError(
                f"parameter {name} is not used in the traced forward pass, and its siblings have no common role; "
                f"pass an example that reaches it, freeze it (requires_grad=False), or give its role in "
                f"known={{{name!r}: ...}}."
            )


def _twin(name: str, named: Mapping[str, nn.Parameter]) -> str | None:
    same = [key for key, other in named.items() if key != name and place(other) == place(named[name])]
    return same[-1] if same else None


def family(name: str) -> str:
    """Return a name with its numbers replaced by '*', equal for the parameters of all layers and experts."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
