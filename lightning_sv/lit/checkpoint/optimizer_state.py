"""Check of an optimizer's state in a checkpoint."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from lightning_sv.errors import ConfigError
from lightning_sv.optim.muon import CompositeOptimizer

#: optimizers whose states are numbers or have the shape of their parameter
_ONE_SHAPE = (AdamW, SGD, CompositeOptimizer)


def check_optimizer_state(checkpoint: dict[str, Any], optimizer: Optimizer) -> None:
    """Check that a saved state has the groups of `optimizer`, and the shapes of its parameters.

    Torch would load them, and a fused step would write past the end of a state of a different
    shape. The rates, which follow a schedule, need not be equal. The states of an optimizer of the
    user may have any shape, so they are not checked.

    Raises:
        ConfigError: a group or state differs
    """
    if "optimizer_states" not in checkpoint:
        expected = "one with optimizer state, which resuming needs"
        raise ConfigError(f"the checkpoint is one with weights only; expected {expected}.")
    try:
        (saved,) = checkpoint["optimizer_states"]
        problem = _group_problem(saved, optimizer) or _state_problem(saved, optimizer)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        problem = f"a group lacks {error}" if isinstance(error, KeyError) else str(error)
    if problem:
        hint = "train the same parameters as then, or use a different checkpoint"
        found = f"the checkpoint's optimizer state is damaged or does not fit ({problem})"
        raise ConfigError(f"{found}; {hint}.")


def _group_problem(saved: dict[str, Any], optimizer: Optimizer) -> str:
    """Return the first difference of the groups; empty if there is none."""
    groups = [dict(group) for group in optimizer.state_dict()["param_groups"]]
    if _numbers(groups) != _numbers(saved["param_groups"]):
        return "its parameters are numbered otherwise"
    # Loading adds only the entries that an older torch did not have.
    optimizer.load_state_dict({"state": {}, "param_groups": saved["param_groups"]})
    loaded = optimizer.state_dict()["param_groups"]
    for group, other in zip(groups, loaded, strict=True):
        for key, value in group.items():
            if not _is_equal(key, value, other[key]):
                return f"{key!r} of a group is {other[key]!r}"
    return ""


def _numbers(groups: Iterable[dict[str, Any]]) -> list[list[int]]:
    """Return the numbers of the parameters of each group."""
    return [group["params"] for group in groups]


def _is_equal(key: str, value: Any, other: Any) -> bool:
    if key == "lr":  # of the schedule
        return isinstance(other, float) and math.isfinite(other)
    return bool(other == value)


def _state_problem(saved: dict[str, Any], optimizer: Optimizer) -> str:
    """Return what is wrong with the states of the parameters; empty if they fit."""
    if type(optimizer) not in _ONE_SHAPE:
        return ""
    parameters: list[Tensor] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    for group in saved["param_groups"]:
        numbers = saved["state"].keys() & set(group["params"])
        entries = {frozenset(saved["state"][number]) for number in numbers}
        if len(entries) > 1:
            return "the state of a parameter is incomplete"
        if not all(_fits(saved["state"][number], parameters[number]) for number in numbers):
            return "the state of a parameter is not of its shape"
    return ""


def _fits(state: dict[str, Tensor], parameter: Tensor) -> bool:
    """Return True if the state of a parameter has numbers, and tensors of its shape, alone."""
    shapes = {value.shape for value in state.values()}
    return shapes <= {torch.Size(), parameter.shape}
