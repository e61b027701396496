"""Optimizers, parameter groups by role, and schedules."""

from lightning_sv.optim.build import OPTIMIZERS, OptimConfig, build_optimizer, configured_groups
from lightning_sv.optim.groups import (
    PARAMETER_ROLES,
    ParameterGroup,
    clip_by_role,
    full_tensor,
    matrix_rate,
    parameter_roles,
    role_groups,
)
from lightning_sv.optim.schedule import ScheduleConfig
from lightning_sv.optim.tables import group_table, parameter_table
from lightning_sv.optim.tuned import tuned_lr

__all__ = [
    "OPTIMIZERS",
    "PARAMETER_ROLES",
    "OptimConfig",
    "ParameterGroup",
    "ScheduleConfig",
    "build_optimizer",
    "clip_by_role",
    "configured_groups",
    "full_tensor",
    "group_table",
    "matrix_rate",
    "parameter_roles",
    "parameter_table",
    "role_groups",
    "tuned_lr",
]
