"""Measurements of a CUDA machine in one command: `make gpu_report`, or `python -m benchmarks.gpu`.

Each stage runs in its own process with a deadline, saves its results continuously, and cannot
affect the next. The test suite runs the same stages at toy size on the CPU, with a CPU version of
the clock.
"""
