"""The SwiGLU feed-forward network (arXiv:2002.05202)."""

from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sv.nn.config import BackboneConfig
from lightning_sv.scale import Branch, Output, ScaleBuilder
from lightning_sv.scale.fast import normed_swiglu
from lightning_sv.scale.fast.eager import uses_definition
from lightning_sv.scale.shapes import Float


class FeedForward(nn.Module):
    """down_proj(silu(gate) * up), including the norm before gate and up."""

    def __init__(self, config: BackboneConfig, build: ScaleBuilder):
        super().__init__()
        d_ff = config.ffn_width
        branch = Branch(d_ff, dnp_width=d_ff)  # dnp normalizes over the hidden units
        self.gate_up = build.group(
            "ffn_norm", config.d_model, {"gate_proj": branch, "up_proj": branch}
        )
        self.down_proj = build.linear("down_proj", d_ff, config.d_model)

    def forward(self, x: Float[Tensor, "B T D"]) -> tuple[Float[Tensor, "B T D"], None]:
        """(B, T, D) -> (B, T, D), and None for no routing; x is before the norm."""
        gate, up = self.gate_up.outputs(x)  # B T d_ff
        return self.down_proj(swiglu_outputs(gate, up)), None


def swiglu_outputs(gate: Output, up: Output) -> Tensor:
    """Return silu(gate) * up of two branches, after their norms and scales.

    If both are normalized, autograd saves only the two products instead of five tensors of their
    size.
    """
    can_fuse = gate.has_one_norm and up.has_one_norm
    if uses_definition() or not can_fuse:
        return F.silu(gate.finish()) * up.finish()
    return normed_swiglu(gate.product, up.product, gate.gamma, up.gamma, (gate.eps, up.eps))
