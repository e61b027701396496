"""Backbones built from scale-vector branches."""

from lightning_sv.nn.backbone import Backbone, meta_backbone
from lightning_sv.nn.config import BackboneConfig
from lightning_sv.nn.loss import document_numbers, flops_per_token, next_token_loss

__all__ = [
    "Backbone",
    "BackboneConfig",
    "document_numbers",
    "flops_per_token",
    "meta_backbone",
    "next_token_loss",
]
