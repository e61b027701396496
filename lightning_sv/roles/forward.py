"""A forward pass that leaves the model as it was, and the numbers that it returns.

A pass can change a model: running statistics, caches, counters. And
the caller may have set autocast, inference mode or compiled code. So the pass runs in one known
state, and mode, values of buffers, random numbers and settings are restored afterwards, also after
an error. A table that a pass replaces by a longer one stays longer, as after any pass.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_map_only


class _ModuleState:
    """Mode of a module, and the values of its buffers, before a pass."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.training = module.training
        self.values = []
        for buffer in module.buffers(recurse=False):
            if not isinstance(buffer, FakeTensor):
                self.values.append((buffer, buffer.clone()))

    def restore(self) -> None:
        """Restore mode and values; a buffer that the pass replaced stays replaced."""
        self.module.training = self.training
        for buffer, value in self.values:
            if not torch.equal(buffer, value):
                buffer.detach().copy_(value)


@contextmanager
def tracing_state(model: nn.Module) -> Iterator[None]:
    """Set eval mode with gradients, without autocast or compiled code; restore all afterwards."""
    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(_ModuleState(module).restore)  # each, also if one of them fails
        with _plain_execution(model):
            for module in model.modules():
                module.training = False
            yield


@contextmanager
def _plain_execution(model: nn.Module) -> Iterator[None]:
    devices = {"cpu", *(parameter.device.type for parameter in model.parameters())} - {"meta"}
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for device in sorted(devices):
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextmanager
def traced_execution(model: nn.Module) -> Iterator[None]:
    """Apply `tracing_state` without kernels for complete layers, in the parameters' fake mode."""
    log = logging.getLogger("torch._subclasses.fake_tensor")  # logs caught exceptions
    unchanged = {"deterministic": None, "allow_tf32": None, "fp32_precision": None}
    with ExitStack() as stack:
        stack.enter_context(patch.object(log, "disabled", True))
        stack.enter_context(tracing_state(model))
        stack.enter_context(torch.backends.mkldnn.flags(enabled=False, **unchanged))
        stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        for parameter in model.parameters():
            if isinstance(parameter, FakeTensor):
                stack.enter_context(parameter.fake_mode)
                break
        yield


def copied(example: Any) -> Any:
    """Return an example with copies of its tensors, because models can write into their inputs."""

    @cache  # the same tensor stays the same: attention compares its inputs
    def copy(tensor: Tensor) -> Tensor:
        clone = tensor.detach().clone()
        return clone.requires_grad_(tensor.requires_grad)

    with torch.inference_mode(False), unset_fake_temporarily():
        return tree_map_only(Tensor, copy, example)


def logits_of(out: Any) -> Any:
    """Return a model's logits, or all its outputs if none are called logits, for torch's trees."""
    if isinstance(out, Mapping):
        return _plain(out.get("logits", out))
    return _plain(getattr(out, "logits", out))


def _plain(out: Any) -> Any:
    """Convert dataclasses and mappings to dicts, recursively: torch's trees do not look inside."""
    if isinstance(out, Mapping):
        return {key: _plain(value) for key, value in out.items()}
    if isinstance(out, list | tuple):
        return [_plain(value) for value in out]
    if is_dataclass(out):
        return {field.name: _plain(getattr(out, field.name)) for field in fields(out)}
    return out
