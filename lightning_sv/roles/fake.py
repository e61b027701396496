"""Models without memory: on fake tensors, also from a transformers configuration.

Roles need shapes and operations, no values. A model of 70 billion parameters is built and traced in
seconds on `FakeTensorMode`, whose tensors have a shape, a dtype and a device, and no data.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from lightning_sv.atomic import read_json
from lightning_sv.errors import ConfigError, expect


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


def model_from_config(folder: Path, *, trust_remote_code: bool = False) -> nn.Module:
    """Build the model of a folder's config.json on fake tensors.

    Its weights are never opened.

    Raises:
        ConfigError: it is not one, needs code that may not run, or its model cannot be built
    """
    file = folder / "config.json"
    wanted = "a folder written by save_pretrained. Merge PEFT's adapters into their model first."
    expect(file.exists(), str(file), "missing", wanted)
    written = read_json(file, "expected a folder written by save_pretrained.")
    module = transformers()
    source = file
    options: dict[str, Any] = {}
    kind = str(written.get("model_type"))
    if kind not in module.CONFIG_MAPPING:  # its code may be in the folder
        if "auto_map" in written and not trust_remote_code:
            why = f"model type {kind!r} needs custom code, which is not run"
            raise ConfigError(f"{file}: {why}; read that code, then pass --trust_remote_code.")
        source = folder
        options["trust_remote_code"] = trust_remote_code

    try:
        config = module.AutoConfig.from_pretrained(source, **options)
        build = _builder(module, written, config)
        return fake_model(lambda: build(config, dtype=torch.bfloat16, **options))
    except Exception as error:  # model code can raise anything
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ConfigError(f"{file}: the model cannot be built ({why}).") from error


def _builder(module: Any, written: dict[str, Any], config: Any) -> Callable[..., nn.Module]:
    """Return the builder of the model: the class in the configuration, or its code's auto_map."""
    name = ""
    names = written.get("architectures")
    if isinstance(names, list) and names:
        name = str(names[0])

    model: Any = getattr(module, name, None)
    config_class = getattr(model, "config_class", None)
    if config_class is not None and isinstance(config, config_class):
        return model._from_config  # type: ignore[no-any-return]

    for auto, code in (written.get("auto_map") or {}).items():
        if auto.startswith("AutoModel") and code.endswith(f".{name}"):
            return getattr(module, auto).from_config  # type: ignore[no-any-return]
    return module.AutoModelForCausalLM.from_config  # type: ignore[no-any-return]
