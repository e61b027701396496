"""Scale vectors in large language models: strategies, experiments, measurements.

The reference implementation of "Negligible in Size, Significant in Effect".
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_sv.nn import Backbone, BackboneConfig
    from lightning_sv.scale import ScaleOptions, ScaleStrategy

__version__ = "0.1.0"

__all__ = ["Backbone", "BackboneConfig", "ScaleOptions", "ScaleStrategy", "__version__"]


def __getattr__(name: str) -> Any:
    """Import on first use (PEP 562): commands that build no model start without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{'nn' if name.startswith('Backbone') else 'scale'}"), name)
