"""Backbones built from scale-vector branches."""

from lightning_sv.nn.backbone import (
    Backbone,
    activated_parameters,
    document_ids,
    flops_per_token,
    meta_backbone,
)
from lightning_sv.nn.config import BackboneConfig, RopeScalingConfig, RouterConfig
from lightning_sv.nn.moe import MixtureOfExperts, Routing, router_loss
from lightning_sv.scale.definitions import next_token_loss

__all__ = [
    "Backbone",
    "BackboneConfig",
    "MixtureOfExperts",
    "RopeScalingConfig",
    "RouterConfig",
    "Routing",
    "activated_parameters",
    "document_ids",
    "flops_per_token",
    "meta_backbone",
    "next_token_loss",
    "router_loss",
]
