"""Sources of a figure other than conf/paper: strategies on the command line, run directories."""
