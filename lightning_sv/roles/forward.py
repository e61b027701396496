"""Traced forward pass, which leaves the model unchanged."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map_only

from lightning_sv.errors import ConfigError
from lightning_sv.roles.trace import Graph, Tracer, Writes


@contextmanager
def tracing_state(model: nn.Module) -> Iterator[None]:
    """Set eval mode with gradients and without autocast or compiled code; restore everything afterwards."""
    from torch._subclasses.fake_tensor import FakeTensor

    before = [(m, m.training, dict(vars(m)), dict(m._buffers)) for m in model.modules()]
    devices = {"cpu", *(p.device.type for p in model.parameters())} - {"meta"}
    tensors = (*model.buffers(), *model.parameters())
    writes = Writes(tensor for tensor in tensors if not isinstance(tensor, FakeTensor))  # fake tensors have no values
    try:
        for module, *_ in before:
            module.training = False
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            for device in sorted(devices):
                stack.enter_context(torch.autocast(device, enabled=False))
            stack.callback(writes.undo)
            stack.enter_context(writes)
            yield
    finally:
        for module, training, attributes, buffers in before:
            module.training = training
            _put_back(module, attributes, buffers)


def _put_back(module: nn.Module, attributes: Mapping[str, Any], buffers: Mapping[str, Tensor | None]) -> None:
    """Restore a module's buffers if they were replaced.

    Its attributes are restored too, because some describe the buffers, such as a cache's length.
    """
    now = dict(module._buffers)
    if list(now) == list(buffers) and all(now[name] is buffer for name, buffer in buffers.items()):
        return
    module._buffers.clear()
    module._buffers.update(buffers)
    for name in vars(module).keys() - attributes.keys():
        del vars(module)[name]
    vars(module).update(attributes)


def run_method(model: nn.Module, method: Callable[..., Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a method of the model under the conditions of a traced pass."""
    with _conditions(model), Tracer():
        return method(**kwargs)


@contextmanager
def _conditions(model: nn.Module) -> Iterator[Any]:
    """Apply `tracing_state` without kernels for whole layers, in the fake mode of the parameters if any."""
    from torch._subclasses.fake_tensor import FakeTensor

    fake = next((p.fake_mode for p in model.parameters() if isinstance(p, FakeTensor)), None)
    log = logging.getLogger("torch._subclasses.fake_tensor")  # logs tracebacks of caught exceptions
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with ExitStack() as stack:
            stack.enter_context(tracing_state(model))
            unchanged = {"deterministic": None, "allow_tf32": None, "fp32_precision": None}
            stack.enter_context(torch.backends.mkldnn.flags(enabled=False, **unchanged))
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
            stack.enter_context(fake or nullcontext())
            yield fake
    finally:
        log.setLevel(level)


def trace(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Graph:
    """Run `model(*args, **kwargs)` once and return its graph.

    The model's mode and buffers and the CPU's random state are restored.

    Raises:
        ConfigError: the forward pass failed
    """
    tracer = Tracer()
    with _conditions(model) as fake:
        if fake is not None and not fake.allow_non_fake_inputs:  # a mode not created by fake_model
            args, kwargs = tree_map_only(
                Tensor, lambda t: t if hasattr(t, "fake_mode") else fake.from_tensor(t), (args, dict(kwargs))
            )
        parameters = {name: tracer.source(p, "parameter") for name, p in model.named_parameters()}
        for tensor in model.buffers():
            tracer.source(tensor, "buffer")
        for tensor in tree_iter((args, kwargs)):
            if isinstance(tensor, Tensor):
                tracer.source(tensor, "input")
        try:
            with tracer:
                out = model(*args, **kwargs)
        except Exception as error:
            why = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"the traced forward pass failed ({type(error).__name__}: {why}); pass an example that the "
                'model accepts, and trace plain operations: model.set_attn_implementation("sdpa") in transformers, no '
                "flex_attention, torch.cond or other higher-order operator elsewhere."
            ) from error
        outputs = {tracer.find(t) for t in tree_iter(plain_output(out)) if isinstance(t, Tensor)}
    return Graph(tracer.nodes, parameters, outputs)


def plain_output(out: Any) -> Any:
    """Convert dataclasses and mappings to dicts and lists, recursively, for torch's tree functions."""
    if isinstance(out, Mapping):
        return {key: plain_output(value) for key, value in out.items()}
    if is_dataclass(out) and not isinstance(out, type):
        return {field.name: plain_output(getattr(out, field.name)) for field in fields(out)}
    if isinstance(out, (list, tuple)):
        return [plain_output(value) for value in out]
    return out
