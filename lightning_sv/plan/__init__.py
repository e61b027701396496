"""What a run will take before it is started: memory of a GPU, hours, checkpoint, data."""
