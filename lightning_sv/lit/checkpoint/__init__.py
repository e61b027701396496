"""Checkpoints: content in addition to the weights, atomic writing, and settings that a reader must share."""
