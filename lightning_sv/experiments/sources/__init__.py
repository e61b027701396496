"""Where a figure comes from: a YAML of conf/paper, strategies on the command line, run directories."""
