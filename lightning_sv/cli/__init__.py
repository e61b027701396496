"""The command line: one file a command, of the same name, each with `run(argv)`; `main` finds them."""
