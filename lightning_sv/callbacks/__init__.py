"""What a run shows and records."""

from lightning_sv.callbacks.branch_norms import BranchNorms, branch_norms
from lightning_sv.callbacks.copying import CopyingMonitor
from lightning_sv.callbacks.experts import Experts
from lightning_sv.callbacks.preconditioner import Preconditioner, preconditioner_figures
from lightning_sv.callbacks.progress import RunProgress
from lightning_sv.callbacks.scalars import Scalars, write_scalars
from lightning_sv.callbacks.sharpness import Sharpness
from lightning_sv.callbacks.trained import TrainedModule, tokens_seen

__all__ = [
    "BranchNorms",
    "CopyingMonitor",
    "Experts",
    "Preconditioner",
    "RunProgress",
    "Scalars",
    "Sharpness",
    "TrainedModule",
    "branch_norms",
    "preconditioner_figures",
    "tokens_seen",
    "write_scalars",
]
