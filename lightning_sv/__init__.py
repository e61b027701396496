"""Scale vectors in large language models: strategies, experiments, measurements.

An implementation of "Negligible in Size, Significant in Effect" (arXiv 2605.26895) in PyTorch
Lightning.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_sv.version import __version__

if TYPE_CHECKING:
    from lightning_sv.callbacks import (
        BranchNorms,
        CopyingMonitor,
        ResidualMonitor,
        RouterMonitor,
        ScaleVectorMonitor,
        Sharpness,
        TrainingMonitor,
    )
    from lightning_sv.interop import apply_strategy, fold_applied, param_groups, weight_decay_roles
    from lightning_sv.lit.cli import PretrainCLI
    from lightning_sv.lit.data import TokenDataModule
    from lightning_sv.lit.module import PretrainModule
    from lightning_sv.lit.text_samples import TextSamples
    from lightning_sv.nn import Backbone, BackboneConfig
    from lightning_sv.runs.checkpoint import load_backbone
    from lightning_sv.runs.events import read_run
    from lightning_sv.scale import RMSNorm, ScaledLinear, ScaleOptions, ScaleStrategy

#: public name -> its module, imported on first use (PEP 562), so that commands without a model
#: start without torch
_HOMES = {
    "PretrainCLI": "lit.cli",
    "PretrainModule": "lit.module",
    "TokenDataModule": "lit.data",
    "TextSamples": "lit.text_samples",
    "BranchNorms": "callbacks",
    "CopyingMonitor": "callbacks",
    "ResidualMonitor": "callbacks",
    "RouterMonitor": "callbacks",
    "ScaleVectorMonitor": "callbacks",
    "Sharpness": "callbacks",
    "TrainingMonitor": "callbacks",
    **dict.fromkeys(("Backbone", "BackboneConfig"), "nn"),
    **dict.fromkeys(("RMSNorm", "ScaleOptions", "ScaleStrategy", "ScaledLinear"), "scale"),
    **dict.fromkeys(
        ("apply_strategy", "fold_applied", "param_groups", "weight_decay_roles"), "interop"
    ),
    "load_backbone": "runs.checkpoint",
    "read_run": "runs.events",
}

__all__ = [
    "Backbone",
    "BackboneConfig",
    "BranchNorms",
    "CopyingMonitor",
    "PretrainCLI",
    "PretrainModule",
    "RMSNorm",
    "ResidualMonitor",
    "RouterMonitor",
    "ScaleOptions",
    "ScaleStrategy",
    "ScaleVectorMonitor",
    "ScaledLinear",
    "Sharpness",
    "TextSamples",
    "TokenDataModule",
    "TrainingMonitor",
    "__version__",
    "apply_strategy",
    "fold_applied",
    "load_backbone",
    "param_groups",
    "read_run",
    "weight_decay_roles",
]


def __getattr__(name: str) -> Any:
    """Import a public name on its first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """Return the public names, which completion shows before their first use."""
    return __all__
