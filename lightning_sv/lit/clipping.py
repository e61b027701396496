"""Clipping of the gradients of a step, by the norm of all of them or per role."""

import math
from typing import Any

import lightning as L
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer

from lightning_sv.errors import expect
from lightning_sv.optim import clip_by_role


def clip_step(module: Any, optimizer: Optimizer, limit: float | None) -> None:
    """Clip by the norm of all gradients, or per role in `optim.clip_by_role`.

    Args:
        module: a `PretrainModule`
        optimizer: its optimizer, whose groups have roles
        limit: largest norm; None or 0 for no limit, as in Lightning
    """
    limits = module.settings.optim.clip_by_role
    norm = _checked_norm(module)
    if limits or norm is None:
        clip_by_role(module.parameters(), optimizer, limit or math.inf, limits)
    elif limit:
        clip_grads_with_norm_(module.parameters(), limit, norm, foreach=True)


def _checked_norm(module: Any) -> Tensor | None:
    """Return the norm that the check before this step found; None if it may be different by now.

    A second norm would read all gradients again, 1% of a step of Llama-1B. Between the check and
    clipping Lightning calls the hooks of further callbacks and of the module. In manual
    optimization the check follows.
    """
    norm: Tensor | None = module.nonfinite.gradient_norm
    if norm is None or not module.automatic_optimization or _may_have_changed(module):
        return None
    return norm


def _may_have_changed(module: Any) -> bool:
    """Return True if code of a user runs between the check and clipping."""
    hook = "on_before_optimizer_step"
    if is_overridden(hook, module):
        return True
    callbacks = module.trainer.callbacks
    later = callbacks[callbacks.index(module.nonfinite) + 1 :]
    return any(
        is_overridden(hook, callback, L.Callback)
        for callback in later
        if callback is not module.expert_bias  # it changes no gradients
    )


def check_clipped_roles(module: Any) -> None:
    """Check that an optimizer has each role of `clip_by_role`; your own may have no roles.

    Raises:
        ConfigError: none has it
    """
    roles: set[str | None] = set()
    for optimizer in module.trainer.optimizers:
        roles.update(group.get("role") for group in optimizer.param_groups)
    for role in module.settings.optim.clip_by_role:
        expected = (
            "a role of a parameter group. Set group['role'], as `ParameterGroup.options` does."
        )
        expect(role in roles, "a role in optim.clip_by_role", role, expected)
