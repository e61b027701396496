"""Sharpness of the held-out loss in all parameters and in the scale vectors, during a run.

callback       when to measure, and where the figures go
measure        the figures of one measurement
subsets        which parameters a measurement is about: all, or those of a role
held_out_loss  the loss of our backbone on held-out text, by default
model_copy     an eager float32 copy of the weights, on which our backbone is measured
own_loss       a loss of the user, on the model that is trained
"""

from lightning_sv.callbacks.sharpness.callback import Sharpness
from lightning_sv.callbacks.sharpness.subsets import parameter_subsets

__all__ = ["Sharpness", "parameter_subsets"]
