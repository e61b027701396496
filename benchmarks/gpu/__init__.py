"""One command that measures a CUDA machine: `make gpu_report`, or `python -m benchmarks.gpu`.

Each stage runs in a process of its own with a deadline, writes its figures as it finds them, and cannot harm the
next. The same stages run on the CPU at toy size in the suite, through the CPU twin of the clock.
"""
