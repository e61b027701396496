"""Statistics of a trained model's scale vectors, read block by block from its files."""

from lightning_sv.interop.inspect.read import vectors_of_backbone, vectors_of_folder
from lightning_sv.interop.inspect.vector_statistics import StoredVector, VectorStatistics, statistics

__all__ = ["StoredVector", "VectorStatistics", "statistics", "vectors_of_backbone", "vectors_of_folder"]
