"""Values of an arm from conf/paper/tuned: its own optimum, or that of another arm."""

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
    """Return the values of an arm, or else those of the arm that stands for it.

    Raises:
        ConfigError: neither of them is tuned
    """
    source = _tuned_arm(tuned, strategy, label)
    if source not in tuned.arms:
        command = tuned.source.partition(";")[0]
        found = f"conf/paper/tuned/{tuned.name}.yaml has no values for {label}"
        hint = f"Add the arm to conf/paper/tuning.yaml, and run `{command}`."
        raise ConfigError(f"{found}; expected some, or values for {source!r}. {hint}")

    values = dict(tuned.arms[source])
    if _STD in values and d_model != tuned.d_model:
        values[_STD] = rounded(values[_STD] * math.sqrt(tuned.d_model / d_model))
    if source == label:
        return TunedKeys(values, "")
    return TunedKeys(values, f"{label} is not tuned itself: it has the values of {source}.")


def _tuned_arm(tuned: Tuned, strategy: ScaleStrategy, label: str) -> str:
    """Return the arm whose values an arm has: itself, the one of `same_as`, or its placement's."""
    if label in tuned.arms:
        return label
    if label in tuned.same_as:
        return tuned.same_as[label]

    # one arm stands for all strategies with scale vectors at the same places
    placement = strategy.placement_row
    if placement.norm_out:
        return "hg+dnp+or+iwd"
    if placement.scale_out:
        return "hg+dp+or"
    if placement.scale_in:
        return "llama"
    return "nop"
