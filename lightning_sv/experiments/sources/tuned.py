"""Which of the optima in conf/paper/tuned an arm takes: its own, or those of its kin.

A file there is written with the report of the figure `tuning` (report/tuned.py), says where it is from, and is copied
by hand: from then on every figure of a budget that names it gives each arm its own learning rate and initial std.
"""

import math
from typing import TYPE_CHECKING

from lightning_sv.errors import ConfigError
from lightning_sv.experiments.spec import Tuned

if TYPE_CHECKING:  # torch with it, and `report` needs none
    from lightning_sv.scale.strategy import ScaleStrategy

#: placement -> the strategy whose values an arm takes that was not tuned itself
KIN = {"nop": "nop", "bp": "llama", "ap": "hg+dp+or", "dp": "hg+dp+or", "dnp": "hg+dnp+or+iwd"}
_STD = "model.backbone.init_std"


def tuned_keys(tuned: Tuned, strategy: "ScaleStrategy", label: str, d_model: int) -> tuple[dict[str, float], str]:
    """The values of an arm, and a sentence where they are those of its kin.

    Its kin is the tuned arm of its strategy that shares most of its exceptions and has no other, else that of `KIN`.

    Args:
        tuned: the optima
        strategy: of the arm
        label: as a recipe names it, exceptions included
        d_model: width of its model

    Raises:
        ConfigError: neither it nor its kin is tuned
    """
    kin = KIN.get(strategy.placement, "")
    alike = [name for name in tuned.arms if _split(name)[0] == str(strategy) and _split(name)[1] <= _split(label)[1]]
    found = max(alike, key=lambda name: len(_split(name)[1]), default=kin)
    if found not in tuned.arms:
        raise ConfigError(f"conf/paper/tuned/{tuned.name}.yaml has no values for {label}, nor for its kin {kin!r}.")
    values = dict(tuned.arms[found])
    if _STD in values and d_model != tuned.d_model:
        values[_STD] = rounded(values[_STD] * math.sqrt(tuned.d_model / d_model))
    return values, "" if found == label else f"{label} is not tuned itself: it has the values of {found}."


def _split(label: str) -> tuple[str, frozenset[str]]:
    """`hg+or[lm_head=dp]` -> the strategy and its exceptions."""
    strategy, _, exceptions = label.rstrip("]").partition("[")
    return strategy, frozenset(filter(None, exceptions.split(",")))


def rounded(value: float) -> float:
    """Two digits: the errors are larger than the third."""
    return float(f"{value:.2g}")
