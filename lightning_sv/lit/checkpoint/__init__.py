"""Checkpoints: their content besides the weights, atomic writing, and the settings that a reader must share."""
