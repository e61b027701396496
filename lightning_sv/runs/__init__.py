"""Run directories and the processes that write them; does not import Lightning."""
