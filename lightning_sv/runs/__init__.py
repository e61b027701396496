"""A run directory and the processes that fill it: lock, events, provenance, jobs, launching. Without Lightning."""
