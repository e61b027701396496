"""Strategies on a model that exists already: parametrizations of its own weights, and their end."""

from lightning_sv.interop.apply.apply import apply_strategy
from lightning_sv.interop.apply.commit import fold_applied
from lightning_sv.interop.apply.report import Report

__all__ = ["Report", "apply_strategy", "fold_applied"]
