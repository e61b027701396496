"""Strategies on existing models, as parametrizations of their weights."""

from lightning_sv.interop.apply.apply import Report, apply_strategy
from lightning_sv.interop.apply.change import fold_applied

__all__ = ["Report", "apply_strategy", "fold_applied"]
