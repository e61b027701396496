"""Several optimizers as one: Lightning, schedulers and checkpoints see a single object."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch.optim import Optimizer


class CompositeOptimizer(Optimizer):
    """One optimizer whose groups are stepped by different ones.

    The parts keep no groups and no state of their own: they hold this object's dicts, so that what a
    scheduler writes and what a checkpoint restores here is what they step with.

    Args:
        parts: optimizers over disjoint parameters; the order of their groups is the order here
    """

    def __init__(self, parts: list[Optimizer]):
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._link()

    def _link(self) -> None:
        groups = iter(self.param_groups)
        for part in self.parts:
            own = list(islice(groups, len(part.param_groups)))
            # Not an assignment: a part then also brings a checkpoint of an older torch up to date.
            part.__setstate__({"state": self.state, "param_groups": own})
        assert not list(groups), "a group without an optimizer"

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "parts": self.parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over groups and state: the last act of load_state_dict, of unpickling and of copying."""
        super().__setstate__(state)
        self._link()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step every part; parameters without a gradient stay as they are."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        assert sum(len(part.param_groups) for part in self.parts) == len(self.param_groups), "group added later"
        for part in self.parts:
            part.step()
        return loss
