"""What a run shows and records."""

from lightning_sv.callbacks.branch_norms import BranchNorms, branch_norms
from lightning_sv.callbacks.experts import Experts
from lightning_sv.callbacks.progress import RunProgress
from lightning_sv.callbacks.scalars import Scalars, tokens_seen, write_scalars

__all__ = ["BranchNorms", "Experts", "RunProgress", "Scalars", "branch_norms", "tokens_seen", "write_scalars"]
