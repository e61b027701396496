"""What a model is called with for a trace, and models without memory."""

import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from lightning_sv.errors import ConfigError
from lightning_sv.nn import Backbone
from lightning_sv.roles.forward import call
from lightning_sv.roles.inputs import inputs_of, token_ids


def example_of(model: nn.Module, example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) of the traced call: the example, or one made from the model's own config.

    Raises:
        ConfigError: no example, and none can be made; a model on the meta device; parameters without a size
    """
    lazy = [name for name, parameter in model.named_parameters() if isinstance(parameter, UninitializedParameter)]
    if lazy:
        raise ConfigError(
            f"parameter {lazy[0]} has no size yet, because its module is lazy; call the model once first."
        )
    if any(parameter.is_meta and type(parameter.data) is Tensor for parameter in model.parameters()):
        raise ConfigError(
            "the model is on the meta device, where a forward pass cannot be followed; build it with "
            "fake_model(lambda: ...) instead, which takes no memory either."
        )
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, tuple):
        return example, {}
    if example is not None:
        return (example,), {}
    if isinstance(model, Backbone):
        return (token_ids(model.config.vocab_size).to(next(model.parameters()).device),), {}
    kwargs = inputs_of(model, partial(call, model))
    if kwargs is None:
        raise ConfigError(
            f"{type(model).__name__} does not say what it reads; call weight_decay_roles in Python with example=, the "
            "tensor, tuple or dict of keywords that it is called with."
        )
    return (), kwargs


def fake_model(build: Callable[[], nn.Module], dtype: torch.dtype | None = None) -> nn.Module:
    """Return what `build` returns, on fake tensors: sizes and types without memory or numbers.

    Args:
        build: makes the model, as AutoModelForCausalLM.from_config does
        dtype: of its parameters by default; experts' grouped products want bfloat16

    Raises:
        ConfigError: `build` reads a tensor's numbers
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

    before = torch.get_default_dtype()
    try:
        with ExitStack() as stack:
            if "transformers" in sys.modules:  # which has copies of torch's functions, and an init_weights of its own
                from transformers.initialization import no_init_weights

                stack.enter_context(no_init_weights())
            stack.enter_context(_nothing_drawn())
            if dtype is not None:
                torch.set_default_dtype(dtype)
            mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            model = build()
        with mode:
            if callable(tie := getattr(model, "tie_weights", None)):  # which would have come after the drawing
                tie()
        return model
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ConfigError(
            f"fake_model: the model reads a tensor's numbers while it is built, {_place(error)}, and a fake tensor has "
            "none; compute them there from Python's numbers (a linspace as `[end * i / (n - 1) for i in range(n)]`), "
            "or give weight_decay_roles the model itself."
        ) from error
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _nothing_drawn() -> Iterator[None]:
    """Let torch.nn.init leave tensors as they are: some of its functions look at the numbers that they drew.

    Those that start with `_no_grad_` are replaced too: they are what a function calls that was imported before.
    """
    names = [name for name in vars(nn.init) if name.endswith("_") and not name.startswith("__")]
    before = {name: getattr(nn.init, name) for name in names}
    try:
        for name in names:
            setattr(nn.init, name, lambda tensor, *args, **kwargs: tensor)
        yield
    finally:
        for name, function in before.items():
            setattr(nn.init, name, function)


def _place(error: BaseException) -> str:
    """Return the last line before an error that is neither torch's nor ours."""
    frames = traceback.extract_tb(error.__traceback__)
    foreign = [frame for frame in frames if not frame.filename.startswith((str(Path(torch.__file__).parent), __file__))]
    if not foreign:
        return "in torch"
    return f"at {foreign[-1].filename}:{foreign[-1].lineno} (`{foreign[-1].line}`)"
