"""Command line: one file per command with the same name and a function `run(argv)`."""
