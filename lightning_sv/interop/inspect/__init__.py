"""What a trained model's scale vectors look like, read from its files, one block of numbers at a time."""

from lightning_sv.interop.inspect.backbone import vectors_of_backbone
from lightning_sv.interop.inspect.hf_folder import vectors_of_folder
from lightning_sv.interop.inspect.vector_statistics import StoredVector, VectorStatistics, statistics

__all__ = ["StoredVector", "VectorStatistics", "statistics", "vectors_of_backbone", "vectors_of_folder"]
