"""The SwiGLU feed-forward network (arXiv:2002.05202) on the branches gate and up."""

from torch import Tensor

from lightning_sv.nn.config import BackboneConfig
from lightning_sv.nn.init import Sublayer
from lightning_sv.nn.swiglu import swiglu_outputs
from lightning_sv.scale import Branch, ScaleBuilder
from lightning_sv.scale.shapes import Float


class FeedForward(Sublayer):
    """down_proj(silu(gate) * up), including the norm before gate and up.

    Args:
        config: sizes of the backbone
        build: builder of the norm and the branches
    """

    def __init__(self, config: BackboneConfig, build: ScaleBuilder):
        super().__init__()
        d_ff = config.ffn_width
        branch = Branch(d_ff, norm_width=d_ff)  # dnp normalizes over the hidden units
        self.gate_up = build.group("ffn_norm", config.d_model, {"gate_proj": branch, "up_proj": branch})
        self.down_proj = build.linear("down_proj", d_ff, config.d_model)

    def output_weights(self) -> tuple[Tensor, ...]:
        """Return the weight of down_proj."""
        return (self.down_proj.weight,)

    def forward(self, x: Float[Tensor, "B T D"]) -> tuple[Float[Tensor, "B T D"], None]:
        """(B, T, D) -> (B, T, D), and None for no routing; x is the residual stream before the norm."""
        return self.down_proj(swiglu_outputs(*self.gate_up.outputs(x))), None
