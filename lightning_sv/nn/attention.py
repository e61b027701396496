"""Causal multi-head attention on the branches q, k and v."""

from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sv.errors import expect
from lightning_sv.nn.config import BackboneConfig
from lightning_sv.nn.rope import rotate
from lightning_sv.scale import Branch, ScaleBuilder
from lightning_sv.scale.shapes import Float

# B batch, T positions, D d_model, H heads (n_kv_head for keys and values), K head width.


class Attention(nn.Module):
    """o_proj(softmax(QK^T / sqrt(K)) V), including the norm before q, k and v.

    With `qk_norm`, q and k are normalized over the head width before the rotation, as in Gemma 3,
    each with one scale vector for all heads.

    Raises:
        ConfigError: `qk_norm` with a strategy that already normalizes q or k (`dnp`)
    """

    def __init__(self, config: BackboneConfig, build: ScaleBuilder):
        super().__init__()
        self.d_head = config.head_width
        q, kv = (
            Branch(n * self.d_head, norm_width=self.d_head, n_head=n)  # dnp normalizes per head
            for n in (config.n_head, config.kv_heads)
        )
        self.qkv = build.group("attn_norm", config.d_model, {"q_proj": q, "k_proj": kv, "v_proj": kv})
        self.grouped = config.kv_heads != config.n_head
        self.o_proj = build.linear("o_proj", q.d_out, config.d_model)
        self.qk_norm = config.qk_norm
        if self.qk_norm:
            normalized = [name for name in ("q_proj", "k_proj") if getattr(self.qkv, name).norm_width is not None]
            why = f"because the strategy {str(build.strategy)!r} already normalizes {' and '.join(normalized)}"
            hint = "Use dp instead of dnp, or model.scale_options.placement_at {q_proj: dp, k_proj: dp}."
            expect(not normalized, "model.backbone.qk_norm", "true", f"false, {why}. {hint}")
            self.q_norm = build.norm("q_norm", self.d_head)
            self.k_norm = build.norm("k_norm", self.d_head)

    def forward(
        self, x: Float[Tensor, "B T D"], rope: tuple[Tensor, Tensor], mask: Tensor | None = None
    ) -> Float[Tensor, "B T D"]:
        """(B, T, D) -> (B, T, D).

        Args:
            x: the residual stream before the norm
            rope: cos and sin of every position
            mask: (B, 1, T, T), True at allowed keys; None for plain causal attention
        """
        q, k, v = (y.unflatten(-1, (-1, self.d_head)) for y in self.qkv(x))  # B T H K
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, rope), rotate(k, rope)
        # Rotate before transposing: the output has the layout of q, and o_proj needs B T H K.
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))  # B H T K
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=self.grouped)
        return self.o_proj(y.transpose(1, 2).flatten(2))
