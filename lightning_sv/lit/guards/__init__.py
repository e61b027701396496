"""Callbacks that `PretrainModule` brings to every Trainer: they guard a run."""
