"""Statistics of runs: paired differences, the block model, verdicts, optima, scaling laws."""
