"""The forward pass that is traced, and the model left as it was."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map_only

from lightning_sv.interop.roles.trace import Graph, Tracer


@contextmanager
def as_for_tracing(model: nn.Module) -> Iterator[None]:
    """Eval mode, gradients on, no autocast, nothing compiled; all as it was afterwards."""
    training = [(module, module.training) for module in model.modules()]
    devices = {"cpu", *(p.device.type for p in model.parameters())} - {"meta"}
    try:
        for module, _ in training:
            module.training = False
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            for device in sorted(devices):
                stack.enter_context(torch.autocast(device, enabled=False))
            yield
    finally:
        for module, was in training:
            module.training = was


def trace(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Graph:
    """Run `model(*args, **kwargs)` once and return what was computed from what.

    The model is left as it was: its mode, its buffers, the random state of the CPU.

    Raises:
        ValueError: the forward pass failed
    """
    from torch._subclasses.fake_tensor import FakeTensor

    fake = next((p.fake_mode for p in model.parameters() if isinstance(p, FakeTensor)), None)
    tracer = Tracer()
    with ExitStack() as stack:
        stack.enter_context(as_for_tracing(model))
        if fake is not None:
            stack.enter_context(fake)
            args, kwargs = tree_map_only(
                Tensor, lambda t: t if isinstance(t, FakeTensor) else fake.from_tensor(t), (args, dict(kwargs))
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
            raise ValueError(
                f"the forward pass that is traced failed ({type(error).__name__}: {why}); pass an example that the "
                "model can read, and for the trace another kernel where one is not for this device."
            ) from error
        finally:
            with torch.no_grad():
                for buffer, old in tracer.saved:
                    buffer.copy_(old)
        outputs = {tracer.find(t) for t in tree_iter(plain_output(out)) if isinstance(t, Tensor)}
    return Graph(tracer.nodes, parameters, outputs)


def plain_output(out: Any) -> Any:
    """Make dicts and lists of what torch's trees do not know: dataclasses, however deep, and the outermost object."""
    if isinstance(out, Mapping):
        return {key: plain_output(value) for key, value in out.items()}
    if is_dataclass(out) and not isinstance(out, type):
        return {field.name: plain_output(getattr(out, field.name)) for field in fields(out)}
    if isinstance(out, (list, tuple)):
        return [plain_output(value) for value in out]
    return out
