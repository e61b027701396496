"""Hugging Face's models in float64 throughout."""

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch


@contextlib.contextmanager
def float64_throughout(theirs: type) -> Iterator[None]:
    """Let the code of a transformers model mean float64 where it says float32: its norms and its RoPE.

    Its formulas stay its own. Models must be built inside, where their frequencies are computed.

    Args:
        theirs: the model's class.
    """
    wide: dict[str, Any] = vars(torch) | {"float32": torch.float64, "float": torch.float64}
    with pytest.MonkeyPatch.context() as patch:
        for module in (theirs.__module__, "transformers.modeling_rope_utils"):
            patch.setattr(f"{module}.torch", types.SimpleNamespace(**wide))
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield
