"""Scale vectors in large language models: strategies, experiments, measurements.

The reference implementation of "Negligible in Size, Significant in Effect".
"""

from lightning_sv.nn import Backbone, BackboneConfig
from lightning_sv.scale import ScaleOptions, ScaleStrategy

__version__ = "0.1.0"

__all__ = ["Backbone", "BackboneConfig", "ScaleOptions", "ScaleStrategy", "__version__"]
