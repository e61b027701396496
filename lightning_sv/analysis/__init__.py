"""Figures and pictures of finished runs: paired differences, scaling laws, grids, curves.

Everything here reads what a run left on disk (event files, config, summary), never a live model.
"""
