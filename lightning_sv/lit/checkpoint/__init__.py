"""Checkpoints: content in addition to the weights, atomic writing, settings of a reader."""
