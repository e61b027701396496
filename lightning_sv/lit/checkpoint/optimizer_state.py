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


def check_optimizer_state(checkpoint: dict[str, Any], fresh: Optimizer) -> None:
    """Check that a saved state has the groups of an optimizer, and the shapes of its parameters.

    Torch would load them, and a fused step would write past the end of a state of a different
    shape. The rates, which follow a schedule, need not be equal. The states of an optimizer of the
    user may have any shape, so they are not checked.

    Args:
        checkpoint: content of the checkpoint
        fresh: optimizer like the run's, built for this check alone, which changes its groups and
            removes its state; its parameters may be on the meta device

    Raises:
        ConfigError: a group or state differs
    """
    if "optimizer_states" not in checkpoint:
        expected = "one with optimizer state, which resuming needs"
        raise ConfigError(f"the checkpoint is one with weights only; expected {expected}.")
    try:
        (saved,) = checkpoint["optimizer_states"]
        _check_groups(saved, fresh)
        if type(fresh) in _ONE_SHAPE:
            _check_states(saved, fresh)
    except KeyError as error:
        raise ConfigError(_misfit(f"a group lacks {error}")) from error
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(_misfit(str(error))) from error


def _misfit(problem: str) -> str:
    hint = "train the same parameters as then, or use a different checkpoint"
    found = f"the checkpoint's optimizer state is damaged or does not fit ({problem})"
    return f"{found}; {hint}."


def _check_groups(saved: dict[str, Any], fresh: Optimizer) -> None:
    """Load the groups into the optimizer; raise `ValueError` if they differ from its own."""
    groups = [dict(group) for group in fresh.state_dict()["param_groups"]]
    if _numbers(groups) != _numbers(saved["param_groups"]):
        raise ValueError("its parameters are numbered otherwise")
    # Loading adds the entries that an older torch did not have, and no others.
    fresh.load_state_dict({"state": {}, "param_groups": saved["param_groups"]})
    loaded = fresh.state_dict()["param_groups"]
    for group, other in zip(groups, loaded, strict=True):
        for key, value in group.items():
            if not _is_equal(key, value, other[key]):
                raise ValueError(f"{key!r} of a group is {other[key]!r}")


def _numbers(groups: Iterable[dict[str, Any]]) -> list[list[int]]:
    """Return the numbers of the parameters of each group."""
    return [group["params"] for group in groups]


def _is_equal(key: str, value: Any, other: Any) -> bool:
    if key == "lr":  # of the schedule
        return isinstance(other, float) and math.isfinite(other)
    return bool(other == value)


def _check_states(saved: dict[str, Any], fresh: Optimizer) -> None:
    """Raise `ValueError` unless all states of a group have the same entries, of fitting shapes."""
    parameters: list[Tensor] = []
    for group in fresh.param_groups:
        parameters += group["params"]
    for group in saved["param_groups"]:
        entries = set()
        for number in saved["state"].keys() & set(group["params"]):
            state: dict[str, Tensor] = saved["state"][number]
            _check_shapes(state, parameters[number])
            entries.add(frozenset(state))
        if len(entries) > 1:
            raise ValueError("the state of a parameter is incomplete")


def _check_shapes(state: dict[str, Tensor], parameter: Tensor) -> None:
    """Raise `ValueError` unless a state has numbers and tensors of its parameter's shape alone."""
    shapes = {value.shape for value in state.values()}
    if not shapes <= {torch.Size(), parameter.shape}:
        raise ValueError("the state of a parameter is not of its shape")
