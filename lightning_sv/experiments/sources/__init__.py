"""Sources of a figure: a YAML of conf/paper, strategies on the command line, run directories."""
