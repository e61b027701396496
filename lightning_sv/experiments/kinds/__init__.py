"""Kinds of panels by their names in conf/paper."""

from lightning_sv.experiments.kinds.base import KINDS
from lightning_sv.experiments.kinds.curves import CurvesKind
from lightning_sv.experiments.kinds.grid import GridKind
from lightning_sv.experiments.kinds.models import LengthsKind, ScalingKind
from lightning_sv.experiments.kinds.scalar import NormsKind, ScalarKind
from lightning_sv.experiments.kinds.table import TableKind

KINDS |= {
    "curves": CurvesKind(),
    "scaling": ScalingKind(),
    "lengths": LengthsKind(),
    "grid": GridKind(),
    "qkv": NormsKind(),
    "scalar": ScalarKind(),
    "table": TableKind(),
}
