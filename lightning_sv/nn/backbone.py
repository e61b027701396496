"""The Llama backbone; its norms and branches come from a scale-vector strategy."""

import torch
from torch import Tensor, nn

from lightning_sv.nn.attention import Attention
from lightning_sv.nn.config import BackboneConfig
from lightning_sv.nn.ffn import FeedForward
from lightning_sv.nn.init import init_weights
from lightning_sv.nn.rope import rope_tables
from lightning_sv.scale import Branch, ScaleBuilder, ScaleOptions, ScaleStrategy


class Block(nn.Module):
    """x + attn(x), then x + ffn(x); attn and ffn hold the norms that feed them (Pre-Norm)."""

    def __init__(self, config: BackboneConfig, build: ScaleBuilder):
        super().__init__()
        self.attn = Attention(config, build)
        self.ffn = FeedForward(config, build)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        x = x + self.attn(x, rope, mask)
        out: Tensor = x + self.ffn(x)
        return out


class Backbone(nn.Module):
    """A decoder-only language model: tokens -> logits.

    At initialization every strategy but `dnp` is the same function, the standard Llama.

    Args:
        config: the sizes.
        scale: the scale-vector strategy, as a string or object.
        options: its finer choices.
        seed: of the initialization; see `nn/init.py`.

    Raises:
        ValueError: an unknown strategy, or an option that names a site the model does not have.

    >>> model = Backbone(BackboneConfig(d_model=32, n_layer=2, n_head=2, vocab_size=64), "hg+or")
    >>> model(torch.zeros(1, 8, dtype=torch.long)).shape
    torch.Size([1, 8, 64])
    """

    def __init__(
        self,
        config: BackboneConfig,
        scale: str | ScaleStrategy = "llama",
        options: ScaleOptions | None = None,
        *,
        seed: int = 0,
    ):
        super().__init__()
        self.config = config
        self.strategy = ScaleStrategy.parse(scale)
        build = ScaleBuilder(self.strategy, options, config.norm_eps)
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(Block(config, build) for _ in range(config.n_layer))
        head = Branch(config.vocab_size, norm_width=config.vocab_size, role="head")
        self.head = build.group("final_norm", config.d_model, {"lm_head": head})
        #: the simplest strategy that is this model; two models of one meaning are not compared
        self.meaning = build.finish()
        if not self.embed.weight.is_meta:
            init_weights(self, config, seed)

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return next-token logits, (B, T) -> (B, T, vocab_size).

        Args:
            tokens: token ids.
            documents: (B, T) document number of each position; attention then stays inside a
                document. None lets it cross document ends.
        """
        x = self.embed(tokens)  # B T D
        rope = rope_tables(tokens.shape[1], self.config.head_width, self.config.rope_theta, tokens.device)
        mask = None
        if documents is not None:
            same = documents.unsqueeze(-1) == documents.unsqueeze(-2)  # B T T
            mask = same.tril().unsqueeze(1)
        for layer in self.layers:
            x = layer(x, rope, mask)
        (logits,) = self.head(x)
        out: Tensor = logits
        return out


def meta_backbone(
    config: BackboneConfig, scale: str | ScaleStrategy = "llama", options: ScaleOptions | None = None
) -> Backbone:
    """Build the backbone without storage, to count and name its parameters in milliseconds."""
    with torch.device("meta"):
        return Backbone(config, scale, options)
