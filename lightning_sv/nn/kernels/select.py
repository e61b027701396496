"""Selection of kernels: PyTorch operations or Triton."""

from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from lightning_sv.errors import ConfigError
from lightning_sv.nn.attention import Attention
from lightning_sv.nn.backbone import Backbone
from lightning_sv.nn.ffn import FeedForward
from lightning_sv.nn.swiglu import swiglu_outputs
from lightning_sv.scale import Output

Kernels = Literal["plain", "triton"]
#: Maximum FFN width: a program holds a row in registers, and wider rows spill to memory in backward.
MOST_WIDTH = 8192


def use_kernels(net: Backbone, kernels: Kernels) -> None:
    """Use `kernels` for the norms in attention and the dense FFN; equal up to rounding.

    'triton' applies if a strategy or the model normalizes q, k and v, or gate and up. A mixture of experts and the
    language-model head do not change.

    Raises:
        ConfigError: 'triton' if Triton cannot run, or for an FFN wider than `MOST_WIDTH`
    """
    if kernels == "plain":
        return
    if reason := unusable():
        raise ConfigError(f"model.kernels is triton; expected plain, because {reason}.")
    if net.config.ffn_width > MOST_WIDTH and not net.config.n_expert:
        raise ConfigError(
            f"model.kernels is triton and the FFN width is {net.config.ffn_width}; expected at most {MOST_WIDTH}. "
            "Use plain."
        )
    from lightning_sv.nn.kernels.heads import norm_rotate

    for module in net.modules():
        if isinstance(module, Attention):
            module.norm_rotate = norm_rotate
        elif isinstance(module, FeedForward):
            module.swiglu_outputs = swiglu_by_kernel


def unusable() -> str | None:
    """Return the reason why Triton kernels cannot run, or None."""
    if find_spec("triton") is None:
        return "triton is not installed (it comes with PyTorch's CUDA builds)"
    from triton import knobs

    if not torch.cuda.is_available() and not knobs.runtime.interpret:
        return "there is no CUDA device"
    return None


def swiglu_by_kernel(gate: Output, up: Output) -> Tensor:
    """Return `swiglu_outputs(gate, up)`, in one kernel if both branches are normalized."""
    from lightning_sv.nn.kernels.gate_up import normed_swiglu

    if not (gate.whole and up.whole):
        return swiglu_outputs(gate, up)
    return normed_swiglu(gate.product, up.product, gate.gamma, up.gamma, gate.eps)
