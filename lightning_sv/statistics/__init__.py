"""Statistics of runs: paired differences, the block model, verdicts, optima, a line over sizes."""
