"""A forward pass that leaves the model as it was, and the numbers that it returns."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_map_only


class _ModuleState:
    """Mode, attributes and buffers of a module before a pass."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.training = module.training
        self.attributes = dict(vars(module))
        self.buffers = dict(module._buffers)

    def restore(self) -> None:
        """Restore the mode, and all attributes if a buffer was replaced or added.

        Some attributes describe a buffer, such as the length of a cache. Otherwise attributes stay:
        in one of them transformers records that its hooks are registered.
        """
        self.module.training = self.training
        now = self.module._buffers
        if list(now) == list(self.buffers) and all(now[k] is b for k, b in self.buffers.items()):
            return
        attributes = vars(self.module)
        for name in attributes.keys() - self.attributes.keys():
            del attributes[name]
        attributes.update(self.attributes)
        now.clear()
        now.update(self.buffers)


@contextmanager
def tracing_state(model: nn.Module) -> Iterator[None]:
    """Set eval mode with gradients, without autocast or compiled code; restore all afterwards."""
    before = [_ModuleState(module) for module in model.modules()]
    real = [buffer for buffer in model.buffers() if not isinstance(buffer, FakeTensor)]
    values = [buffer.clone() for buffer in real]
    try:
        for state in before:
            state.module.training = False
        with _plain_execution(model):
            yield
    finally:
        _write_back(real, values)
        for state in before:
            state.restore()


@torch.no_grad()
def _write_back(buffers: list[Tensor], values: list[Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        if not torch.equal(buffer, value):
            buffer.copy_(value)


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
    modes = (p.fake_mode for p in model.parameters() if isinstance(p, FakeTensor))
    fake = next(modes, None)
    log = logging.getLogger("torch._subclasses.fake_tensor")  # logs caught exceptions
    unchanged = {"deterministic": None, "allow_tf32": None, "fp32_precision": None}
    with ExitStack() as stack:
        stack.enter_context(patch.object(log, "disabled", True))
        stack.enter_context(tracing_state(model))
        stack.enter_context(torch.backends.mkldnn.flags(enabled=False, **unchanged))
        stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        stack.enter_context(fake or nullcontext())
        yield


def copied(example: Any) -> Any:
    """Return an example with copies of its tensors, because models can write into their inputs."""
    copies: dict[int, Tensor] = {}  # the same tensor stays the same: attention compares its inputs

    def copy(tensor: Tensor) -> Tensor:
        if _is_expanded(tensor):
            return tensor  # torch refuses writes, and a copy would need the memory
        if id(tensor) not in copies:
            clone = tensor.detach().clone()
            copies[id(tensor)] = clone.requires_grad_(tensor.requires_grad)
        return copies[id(tensor)]

    with torch.inference_mode(False), unset_fake_temporarily():
        return tree_map_only(Tensor, copy, example)


def strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor; empty if it has none."""
    return tuple(tensor.stride()) if tensor.layout == torch.strided else ()


def _is_expanded(tensor: Tensor) -> bool:
    steps = zip(strides(tensor), tensor.shape, strict=False)
    return any(step == 0 and size > 1 for step, size in steps)


def plain_output(out: Any) -> Any:
    """Convert dataclasses and mappings to dicts and lists, recursively, for torch's trees."""
    if isinstance(out, Mapping):
        return {key: plain_output(value) for key, value in out.items()}
    if is_dataclass(out) and not isinstance(out, type):
        return {field.name: plain_output(getattr(out, field.name)) for field in fields(out)}
    if isinstance(out, (list, tuple)):
        return [plain_output(value) for value in out]
    return out


def logits_of(out: Any) -> Any:
    """Return a model's logits, or all its outputs if none are called logits."""
    plain = plain_output(out)
    return plain["logits"] if isinstance(plain, dict) and "logits" in plain else plain
