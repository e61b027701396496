"""Callbacks that `PretrainModule` brings to every Trainer: they guard a run, and change nothing that it computes."""
