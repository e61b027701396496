"""Roles of the parameters of any model, from one traced forward pass."""

from lightning_sv.roles.api import weight_decay_roles
from lightning_sv.roles.fake import fake_model
from lightning_sv.roles.result import Roles
from lightning_sv.roles.table import family
from lightning_sv.roles.types import MODEL_ROLES, ModelParameter, ModelRole

__all__ = [
    "MODEL_ROLES",
    "ModelParameter",
    "ModelRole",
    "Roles",
    "fake_model",
    "family",
    "weight_decay_roles",
]
