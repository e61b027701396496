"""Resources of a run before it starts: GPU memory, hours, checkpoint size, data."""
