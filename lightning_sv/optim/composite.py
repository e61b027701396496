"""Several optimizers as a single object for Lightning, schedulers and checkpoints."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch.optim import Optimizer


class CompositeOptimizer(Optimizer):
    """One optimizer whose groups are updated by different optimizers.

    The parts have no groups and no state of their own; they share this object's dicts. Values written by a
    scheduler or restored from a checkpoint are therefore used by the parts.

    Args:
        parts: optimizers of disjoint parameters; their groups are concatenated in this order
    """

    def __init__(self, parts: list[Optimizer]):
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._link()

    def _link(self) -> None:
        groups = iter(self.param_groups)
        for part in self.parts:
            part_groups = list(islice(groups, len(part.param_groups)))
            # __setstate__ instead of an assignment, so that each part migrates checkpoints of older torch versions.
            part.__setstate__({"state": self.state, "param_groups": part_groups})
        assert not list(groups), "a group without an optimizer"

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "parts": self.parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set groups and state; called at the end of load_state_dict, unpickling and copying."""
        super().__setstate__(state)
        self._link()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step every part; parameters without a gradient do not change."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        assert sum(len(part.param_groups) for part in self.parts) == len(self.param_groups), "group added later"
        for part in self.parts:
            part.step()
        return loss
