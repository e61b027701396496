"""Statistics of a trained model's scale vectors, read from its files.

The files are a folder of transformers (configuration and safetensors), or a run of this package.
"""

from lightning_sv.interop.inspect.backbone import vectors_of_backbone
from lightning_sv.interop.inspect.folder import FoundVectors, vectors_of_folder
from lightning_sv.interop.inspect.statistics import StoredVector, VectorStatistics, statistics

__all__ = [
    "FoundVectors", "StoredVector", "VectorStatistics", "statistics", "vectors_of_backbone",
    "vectors_of_folder",
]  # fmt: skip
