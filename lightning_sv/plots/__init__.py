"""Plots: their style, and those of one run, its scale vectors, a model and the theory."""
