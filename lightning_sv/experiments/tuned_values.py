"""Values of an arm from conf/paper/tuned: its own optimum, or that of a related arm."""

import math
from typing import NamedTuple

from lightning_sv.errors import ConfigError
from lightning_sv.experiments.spec import Tuned, rounded
from lightning_sv.scale import ScaleStrategy

_STD = "model.backbone.init_std"


class TunedKeys(NamedTuple):
    """Key of `fit` -> tuned value, and a sentence if they are not those of the arm itself."""

    keys: dict[str, float]
    note: str


def tuned_keys(tuned: Tuned, strategy: ScaleStrategy, label: str, d_model: int) -> TunedKeys:
    """Return the values of an arm, or those of a related arm.

    The related arm is the tuned one of the same strategy with most of its exceptions and no other,
    else the one that has a norm after the matrix or scale vectors at the same sides.

    Raises:
        ConfigError: neither the arm nor its related arm is tuned
    """
    placement_arm = _arm_of_placement(strategy)
    source = _same_strategy(tuned, str(strategy), label) or placement_arm
    if source not in tuned.arms:
        command = tuned.source.partition(";")[0]
        found = f"conf/paper/tuned/{tuned.name}.yaml has no values for {label}"
        hint = f"Add the arm to conf/paper/tuning.yaml, and run `{command}`."
        raise ConfigError(f"{found}; expected some, or values for {placement_arm!r}. {hint}")

    values = dict(tuned.arms[source])
    if _STD in values and d_model != tuned.d_model:
        values[_STD] = rounded(values[_STD] * math.sqrt(tuned.d_model / d_model))
    if source == label:
        return TunedKeys(values, "")
    return TunedKeys(values, f"{label} is not tuned itself: it has the values of {source}.")


def _same_strategy(tuned: Tuned, strategy: str, label: str) -> str | None:
    """Return the tuned arm of the strategy with most exceptions of the label and no other."""
    exceptions = _exceptions(label)
    related = []
    for name in tuned.arms:
        is_same = name.partition("[")[0] == strategy
        has_no_other = _exceptions(name) <= exceptions
        if is_same and has_no_other:
            related.append(name)
    return max(related, key=lambda name: len(_exceptions(name)), default=None)


def _arm_of_placement(strategy: ScaleStrategy) -> str:
    """Return the arm that stands for all strategies of a placement."""
    placement = strategy.placement_row
    if placement.norm_out:
        return "hg+dnp+or+iwd"
    if placement.scale_out:
        return "hg+dp+or"
    return "llama" if placement.scale_in else "nop"


def _exceptions(label: str) -> frozenset[str]:
    """Return the exceptions in the brackets of `hg+or[lm_head=dp]`."""
    _, _, exceptions = label.rstrip("]").partition("[")
    return frozenset(filter(None, exceptions.split(",")))
