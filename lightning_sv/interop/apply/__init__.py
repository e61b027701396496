"""Strategies on existing models, as parametrizations of their weights."""

from lightning_sv.interop.apply.applied import fold_applied
from lightning_sv.interop.apply.apply import Report, apply_strategy

__all__ = ["Report", "apply_strategy", "fold_applied"]
