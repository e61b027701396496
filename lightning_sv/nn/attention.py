"""Causal multi-head attention on the branches q, k, v."""

from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sv.nn.config import BackboneConfig
from lightning_sv.nn.rope import rotate
from lightning_sv.scale import Branch, ScaleBuilder

# B batch, T positions, D d_model, H heads, K head width.


class Attention(nn.Module):
    """o_proj(softmax(QK^T / sqrt(K)) V), with the norm that feeds q, k and v inside.

    Args:
        config: the sizes.
        build: gives the norm and the branches of the strategy.
    """

    def __init__(self, config: BackboneConfig, build: ScaleBuilder):
        super().__init__()
        self.d_head = config.head_width
        inner = config.n_head * self.d_head
        branch = Branch(inner, norm_width=self.d_head)  # dnp normalizes per head
        self.qkv = build.group("attn_norm", config.d_model, {"q_proj": branch, "k_proj": branch, "v_proj": branch})
        self.o_proj = nn.Linear(inner, config.d_model, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D).

        Args:
            x: the residual stream, not yet normalized.
            rope: cos and sin of every position.
            mask: (B, 1, T, T), True where a query may look; None for plain causal attention.
        """
        q, k, v = (y.unflatten(-1, (-1, self.d_head)).transpose(1, 2) for y in self.qkv(x))  # B H T K
        q, k = rotate(q, rope), rotate(k, rope)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        out: Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return out
