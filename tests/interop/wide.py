"""Hugging Face's models in float64 throughout."""

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch


@contextlib.contextmanager
def float64_throughout(theirs: type) -> Iterator[None]:
    """Use float64 instead of float32 in the norms and the RoPE of this class; build models inside,
    for frequencies."""
    wide: dict[str, Any] = vars(torch) | {"float32": torch.float64, "float": torch.float64}
    with pytest.MonkeyPatch.context() as patch:
        for module in (theirs.__module__, "transformers.modeling_rope_utils"):
            patch.setattr(f"{module}.torch", types.SimpleNamespace(**wide))
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield
