"""Statistics of finished runs: paired differences, the block model, verdicts, optima of grids, scaling laws."""
