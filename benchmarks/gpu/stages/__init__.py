"""The stages of `make gpu_report`: a file each, with a function that takes a `Task` and returns what it found."""
