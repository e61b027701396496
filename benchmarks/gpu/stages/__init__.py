"""Stages of `make gpu_report`: one file each, with a function from a `Task` to its results."""
