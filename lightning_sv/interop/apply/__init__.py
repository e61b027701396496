"""Strategies on a model that exists already: parametrizations of its own weights, and their end."""

from lightning_sv.interop.apply.apply import Report, apply_strategy
from lightning_sv.interop.apply.execute import fold_applied

__all__ = ["Report", "apply_strategy", "fold_applied"]
