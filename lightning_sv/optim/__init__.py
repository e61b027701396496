"""Optimizers, parameter groups by role, and schedules."""

from lightning_sv.optim.adamw import OptimConfig, adamw
from lightning_sv.optim.groups import (
    ParameterGroup,
    group_table,
    parameter_groups,
    parameter_roles,
)
from lightning_sv.optim.schedule import ScheduleConfig
from lightning_sv.optim.tuned import tuned_lr

__all__ = [
    "OptimConfig",
    "ParameterGroup",
    "ScheduleConfig",
    "adamw",
    "group_table",
    "parameter_groups",
    "parameter_roles",
    "tuned_lr",
]
