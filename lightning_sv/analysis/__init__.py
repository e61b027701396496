"""Statistics and figures of finished runs, from their files: paired differences, scaling laws, grids, curves."""
