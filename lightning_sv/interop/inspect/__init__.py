"""Statistics of a trained model's scale vectors: any model, or a backbone of this package."""

from lightning_sv.interop.inspect.backbone import vectors_of_backbone
from lightning_sv.interop.inspect.model import FoundVectors, load_model, vectors_of_model
from lightning_sv.interop.inspect.statistics import StoredVector, VectorStatistics, statistics

__all__ = [
    "FoundVectors", "StoredVector", "VectorStatistics", "load_model", "statistics",
    "vectors_of_backbone", "vectors_of_model",
]  # fmt: skip
