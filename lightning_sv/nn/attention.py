"""Causal multi-head attention on the branches q, k and v."""

from typing import TYPE_CHECKING

from torch import Tensor, nn

from lightning_sv.errors import ConfigError
from lightning_sv.nn.attention_kernels import AttentionBackend, attend
from lightning_sv.nn.config import BackboneConfig
from lightning_sv.scale import Branch, ScaleBuilder
from lightning_sv.scale.definitions import rotate
from lightning_sv.scale.shapes import Float

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

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
        d_head = config.head_width
        # dnp normalizes per head
        q = Branch(config.n_head * d_head, dnp_width=d_head, n_head=config.n_head)
        kv = Branch(config.kv_heads * d_head, dnp_width=d_head, n_head=config.kv_heads)
        self.d_head = d_head
        self.qkv = build.group(
            "attn_norm", config.d_model, {"q_proj": q, "k_proj": kv, "v_proj": kv}
        )
        #: `model.attention_backend`
        self.backend: AttentionBackend = "auto"
        self.o_proj = build.linear("o_proj", q.d_out, config.d_model)
        self.qk_norm = config.qk_norm
        if self.qk_norm:
            self._check_not_normalized(build)
            self.q_norm = build.norm("q_norm", d_head)
            self.k_norm = build.norm("k_norm", d_head)

    def _check_not_normalized(self, build: ScaleBuilder) -> None:
        normalized = []
        for name, branch in self.qkv.branches():
            if name != "v_proj" and branch.norm_width is not None:
                normalized.append(name)
        if normalized:
            strategy = str(build.strategy)
            why = f"because the strategy {strategy!r} already normalizes {' and '.join(normalized)}"
            placement_at = "{q_proj: dp, k_proj: dp}"
            hint = f"Use dp instead of dnp, or model.scale_options.placement_at {placement_at}."
            raise ConfigError(f"model.backbone.qk_norm is true; expected false, {why}. {hint}")

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        rope: tuple[Tensor, Tensor],
        mask: "Tensor | BlockMask | None" = None,
    ) -> Float[Tensor, "B T D"]:
        """(B, T, D) -> (B, T, D).

        Args:
            x: the residual stream before the norm
            rope: cos and sin of every position
            mask: (B, 1, T, T), True at allowed keys, or the same for flex_attention; None for
                plain causal attention
        """
        q, k, v = (y.unflatten(-1, (-1, self.d_head)) for y in self.qkv(x))  # B T H K
        if self.qk_norm:
            q = self.q_norm(q)
            k = self.k_norm(k)
        q = rotate(q, rope)
        k = rotate(k, rope)
        # Rotate before transposing: the output has the layout of q, and o_proj needs B T H K.
        q = q.transpose(1, 2)  # B H T K
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        y = attend(q, k, v, mask, self.backend)
        return self.o_proj(y.transpose(1, 2).flatten(2))
