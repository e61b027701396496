"""Sharpness of the held-out loss in all parameters and in the scale vectors, during a run.

subsets      which parameters a measurement is about: a role, a block, a branch
batch_size   how many sequences a measurement can afford, from the run's plan
model_copy   an eager float32 copy of the weights, on which our backbone is measured
measure      the figures of one measurement
callback     when to measure, on what, and where the figures go
"""

from lightning_sv.callbacks.sharpness.callback import Sharpness
from lightning_sv.callbacks.sharpness.subsets import parameter_subsets

__all__ = ["Sharpness", "parameter_subsets"]
