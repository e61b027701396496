"""Models without memory, on fake tensors.

Roles need shapes and operations, no values. A model of 70 billion parameters is built and traced in
seconds on `FakeTensorMode`, whose tensors have a shape, a dtype and a device, and no data.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import ModuleType
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from lightning_sv.errors import ConfigError


def fake_model(build: Callable[[], nn.Module], dtype: torch.dtype | None = None) -> nn.Module:
    """Return the result of `build` on fake tensors: shapes and dtypes without memory or values.

    Args:
        build: function that builds the model, for instance with AutoModelForCausalLM.from_config
        dtype: default dtype of the parameters; grouped products of experts need bfloat16

    Raises:
        ConfigError: `build` reads the values of a tensor
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        with _no_initialization(), FakeTensorMode(allow_non_fake_inputs=True):
            model = build()
            tie = getattr(model, "tie_weights", None)  # usually called after initialization
            if callable(tie):
                tie()
        return model
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        why = "the model reads a tensor's values while it is built, and a fake tensor has none"
        hint = "Compute them from Python numbers, or pass the real model to weight_decay_roles."
        raise ConfigError(f"fake_model: {why}. {hint}") from error
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _no_initialization() -> Iterator[None]:
    """Replace initializations that fake tensors cannot run, or that would only take time."""
    with ExitStack() as stack:
        if "transformers" in sys.modules:  # transformers has its own copies of torch's functions
            from transformers.initialization import no_init_weights

            stack.enter_context(no_init_weights())
        # The only one that reads the values that it sampled, also if imported by its public name.
        unchanged = patch.object(
            nn.init, "_no_grad_trunc_normal_", lambda tensor, *args, **_: tensor
        )
        stack.enter_context(unchanged)
        yield


def transformers() -> ModuleType:
    """Import transformers, which training does without."""
    try:
        return import_module("transformers")
    except ImportError as error:
        hint = "run make install-hf, or pip install 'transformers>=5'."
        raise ConfigError(f"transformers is not installed ({error}); {hint}") from error
