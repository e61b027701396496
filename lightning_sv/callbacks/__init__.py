"""Callbacks for LightningModules whose model has scale vectors.

A callback that measures has one of these bases, which say when it acts and log its figures:

StepCallback          at some steps of a run: Sharpness
  BranchCallback      figures of each branch: BranchNorms, ScaleVectorMonitor
  HeldOutProbe        figures of held-out text: CopyingMonitor, ResidualMonitor
  MetricAccumulator   sums over micro-batches: TrainingMonitor, RouterMonitor
"""

from lightning_sv.callbacks.branch_norms import BranchNorms, branch_norms
from lightning_sv.callbacks.copying import CopyingMonitor
from lightning_sv.callbacks.logging import write_scalars
from lightning_sv.callbacks.progress import RunProgress
from lightning_sv.callbacks.residual_monitor import ResidualMonitor, residual_ratios
from lightning_sv.callbacks.router_monitor import RouterMonitor
from lightning_sv.callbacks.run_state import tokens_seen
from lightning_sv.callbacks.scale_vector_monitor import ScaleVectorMonitor, scale_vector_figures
from lightning_sv.callbacks.sharpness import Sharpness
from lightning_sv.callbacks.step_callback import StepCallback
from lightning_sv.callbacks.training_monitor import TrainingMonitor

__all__ = [
    "BranchNorms",
    "CopyingMonitor",
    "ResidualMonitor",
    "RouterMonitor",
    "RunProgress",
    "ScaleVectorMonitor",
    "Sharpness",
    "StepCallback",
    "TrainingMonitor",
    "branch_norms",
    "residual_ratios",
    "scale_vector_figures",
    "tokens_seen",
    "write_scalars",
]
