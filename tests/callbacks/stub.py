"""The parts of a Trainer that callbacks read, without a fit."""

from types import SimpleNamespace
from typing import Any

import torch
from lightning import LightningModule


def run_of(steps: float, **more: Any) -> Any:
    """Return a stand-in for the Trainer of a run of this number of steps, at its beginning."""
    strategy = SimpleNamespace(
        root_device=torch.device("cpu"),
        reduce=lambda value, reduce_op: value,
        broadcast=lambda value: value,
        barrier=lambda: None,
    )
    usual = {
        "global_step": 0,
        "max_steps": steps,
        "estimated_stepping_batches": steps,
        "callbacks": [],
        "callback_metrics": {},
        "lightning_module": LightningModule(),
        "is_global_zero": True,
        "strategy": strategy,
    }
    return SimpleNamespace(**(usual | more))
