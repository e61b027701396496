"""Interfaces to other code: folding, Hugging Face, roles and parameter groups for any model."""

from lightning_sv.interop.apply.apply import apply_strategy
from lightning_sv.interop.apply.folding import fold_applied
from lightning_sv.interop.apply.report import Report
from lightning_sv.interop.fold import Folding, fold, foldable
from lightning_sv.interop.groups import decayed_names, param_groups
from lightning_sv.interop.hf.convert import to_hugging_face
from lightning_sv.roles import ModelParameter, Roles, fake_model, weight_decay_roles

__all__ = [
    "Folding", "ModelParameter", "Report", "Roles", "apply_strategy", "decayed_names", "fake_model",
    "fold", "fold_applied", "foldable", "param_groups", "to_hugging_face", "weight_decay_roles",
]  # fmt: skip
