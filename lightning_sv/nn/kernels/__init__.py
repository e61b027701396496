"""Kernels for a GPU beside the plain path, which is what to read."""
