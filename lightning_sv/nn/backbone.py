"""Backbone of Llama, Gemma and LlamaMoE, with norms and branches of a scale-vector strategy.

    tokens -> embed -> layers: x + attn(x), x + ffn(x) -> head: norm, lm_head -> logits or loss

The families are one class: Gemma's additional norms and experts are options of the config, and
where scale vectors stand is decided by `ScaleBuilder`. No module here reads the strategy.
"""

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_sv.nn.attention import Attention
from lightning_sv.nn.attention_kernels import (
    AttentionBackend,
    document_block_mask,
    document_mask,
)
from lightning_sv.nn.config import BackboneConfig
from lightning_sv.nn.ffn import FeedForward
from lightning_sv.nn.init import init_weights
from lightning_sv.nn.moe import MixtureOfExperts, Routing
from lightning_sv.nn.rope import rope_tables
from lightning_sv.scale import (
    Branch,
    BranchGroup,
    ScaleBuilder,
    ScaledLinear,
    ScaleOptions,
    ScaleStrategy,
    expand_preset,
)
from lightning_sv.scale.definitions import product_dtype
from lightning_sv.scale.fast import linear_cross_entropy
from lightning_sv.scale.shapes import Float, Int
from lightning_sv.scale.vector import gamma_of

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

CompileMode = Literal["none", "model", "block"]
#: Let Inductor recompute cheap operations in their consumers instead of storing float32 results
#: (torch 2.11 and 2.13).
INDUCTOR: dict[str, Any] = {
    "realize_reads_threshold": 16,
    "realize_opcount_threshold": 200,
    "realize_acc_reads_threshold": 32,
}


class _Copied(nn.Module):
    """A module whose copies run eagerly, because a compiled `forward` is bound to the original."""

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key != "forward"}


class Block(_Copied):
    """x + attn(x), then x + ffn(x); attn and ffn include their norms (Pre-Norm).

    With `post_norm`, their outputs are normalized too, as in Gemma 3.
    """

    def __init__(self, config: BackboneConfig, build: ScaleBuilder):
        super().__init__()
        self.attn = Attention(config, build)
        ffn_class = MixtureOfExperts if config.n_expert else FeedForward
        self.ffn = ffn_class(config, build)
        self.attn_post_norm: nn.Module = nn.Identity()
        self.ffn_post_norm: nn.Module = nn.Identity()
        if config.post_norm:
            self.attn_post_norm = build.norm("attn_post_norm", config.d_model)
            self.ffn_post_norm = build.norm("ffn_post_norm", config.d_model)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        rope: tuple[Tensor, Tensor],
        mask: "Tensor | BlockMask | None" = None,
    ) -> tuple[Float[Tensor, "B T D"], Routing | None]:
        """(B, T, D) -> (B, T, D), and the routing of a mixture of experts or None."""
        x = x + self.attn_post_norm(self.attn(x, rope, mask))
        y, routing = self.ffn(x)
        return x + self.ffn_post_norm(y), routing


class Head(_Copied, BranchGroup):
    """The final norm and its only branch, lm_head; computes the loss without storing all logits."""

    lm_head: ScaledLinear

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Return the logits (B, T, vocab_size); with `targets` (B, T), their mean loss in nats."""
        xhat = self.norm(x)
        if targets is None:
            return self.branch("lm_head", xhat)

        lm_head = self.lm_head
        gamma_in = gamma_of(lm_head.scale_in)
        gamma_out = gamma_of(lm_head.scale_out)
        norm_eps = None if lm_head.norm_width is None else lm_head.eps
        return linear_cross_entropy(xhat, lm_head.weight, targets, gamma_in, gamma_out, norm_eps)


class Backbone(nn.Module):
    """A decoder-only language model: tokens -> logits.

    At initialization all strategies except `dnp` are the same function, the standard Llama.

    Args:
        config: sizes of the backbone
        scale: scale-vector strategy, as a string or object
        options: further options of the strategy
        seed: seed of the initialization; see `nn/init.py`

    Raises:
        ConfigError: an unknown strategy, one that does not fit the model, or an option for a site
            that the model does not have

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
        scale, options = expand_preset(scale, options or ScaleOptions())
        self.strategy = ScaleStrategy.parse(scale)
        build = ScaleBuilder(self.strategy, options, config.norm_eps)
        # An explicit weight, because nn.Embedding would sample one, which imports torch's compiler
        # on the meta device.
        size = config.vocab_size, config.d_model
        self.embed = nn.Embedding(*size, _weight=torch.empty(*size))
        self.layers = nn.ModuleList(Block(config, build) for _ in range(config.n_layer))
        head = Branch(config.vocab_size, dnp_width=config.vocab_size, role="head")
        self.head = build.group("final_norm", config.d_model, {"lm_head": head}, Head)
        #: save only the inputs of blocks for backward, and recompute the blocks there
        self.activation_checkpointing = False
        #: keep the residual stream in the dtype of the products (bf16 under autocast) instead of
        #: float32
        self.narrow_residual = False
        #: the simplest strategy that builds this model; models with the same canonical strategy are
        #: not compared
        self.canonical = build.finish()
        if not self.embed.weight.is_meta:
            init_weights(self, config, seed)

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        documents: Int[Tensor, "B T"] | None = None,
        *,
        targets: Int[Tensor, "B T"] | None = None,
        with_routing: bool = False,
    ) -> Tensor | tuple[Tensor, list[Routing]]:
        """Return next-token logits, (B, T) -> (B, T, vocab_size), or the loss for `targets`.

        Args:
            tokens: (B, T) token ids
            documents: (B, T) document number of each position, to restrict attention to the same
                document; None to attend across documents
            targets: (B, T) token ids, shifted by one position: return their `next_token_loss`
                instead of the logits, computed in chunks. Every target is a token id; ignored
                targets, such as -100, are not supported
            with_routing: if True, also return the routing of each mixture of experts, in the order
                of the blocks; an empty list for a dense model
        """
        x = self.embed(tokens)  # B T D
        config = self.config
        rope = rope_tables(
            tokens.shape[1], config.head_width, config.rope_theta, x, config.rope_scaling
        )
        if self.narrow_residual:
            x = x.to(product_dtype(x, self.embed.weight))
        mask = None if documents is None else self._mask_of(documents)

        routings = []
        for layer in self.layers:
            x, routing = self._run(layer, x, rope, mask)
            if routing is not None:
                routings.append(routing)

        out: Tensor = self.head(x, targets)
        return (out, routings) if with_routing else out

    def set_attention_backend(self, backend: AttentionBackend) -> None:
        """Set the kernel of attention in every block."""
        for module in self.modules():
            if isinstance(module, Attention):
                module.backend = backend

    def _mask_of(self, documents: Tensor) -> "Tensor | BlockMask":
        """Return the mask of flex_attention if the blocks are compiled for a GPU."""
        is_compiled = torch.compiler.is_compiling() or "forward" in vars(self.layers[0])
        if documents.is_cuda and is_compiled:
            return document_block_mask(documents)
        return document_mask(documents)

    def _run(
        self,
        layer: nn.Module,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        mask: "Tensor | BlockMask | None",
    ) -> tuple[Tensor, Routing | None]:
        if self.activation_checkpointing and torch.is_grad_enabled():
            return checkpoint(layer, x, rope, mask, use_reentrant=False)
        return layer(x, rope, mask)


def document_ids(tokens: Int[Tensor, "B T"], eot: int) -> Int[Tensor, "B T"]:
    """Number the documents of packed sequences; each ends with an end-of-text token.

    (B, T) token ids -> (B, T) integers, non-decreasing along T.
    """
    is_end = tokens == eot
    return is_end.cumsum(-1) - is_end.long()


def meta_backbone(
    config: BackboneConfig,
    scale: str | ScaleStrategy = "llama",
    options: ScaleOptions | None = None,
) -> Backbone:
    """Build the backbone without storage, to count or name its parameters."""
    with torch.device("meta"):
        return Backbone(config, scale, options)


def activated_parameters(model: nn.Module, config: BackboneConfig) -> int:
    """Count the parameters used per token: all, but only n_expert_active of n_expert experts."""
    total = sum(parameter.numel() for parameter in model.parameters())
    if not config.n_expert:
        return total

    idle = config.n_expert - config.n_expert_active
    for module in model.modules():
        if getattr(module, "batch_dims", ()) == (config.n_expert,):
            n_of_experts = sum(p.numel() for p in module.parameters(recurse=False))
            total -= n_of_experts // config.n_expert * idle
    return total


def flops_per_token(activated: int, config: BackboneConfig, seq_len: int) -> float:
    """Return the FLOPs of forward and backward per token: 6 N + 12 n_layer T (H K).

    N is the number of `activated_parameters` without the embedding (a lookup). Attention counts as
    full, not causal, as in appendix B of the PaLM paper (arXiv:2204.02311), with the number of
    query heads.
    """
    n = activated - config.vocab_size * config.d_model
    return 6.0 * n + 12.0 * config.n_layer * seq_len * config.n_head * config.head_width


def compile_backbone(net: Backbone, how: CompileMode, options: dict[str, Any] = INDUCTOR) -> None:
    """Compile nothing, the model, or each block and the head, in place: state-dict keys stay.

    With `block`, one compilation serves all blocks and hooks on blocks still run. DDP's hooks run
    between these graphs, so dynamo does not need to split them at DDP's buckets.
    """
    if how == "none":
        return
    torch._dynamo.config.optimize_ddp = False
    if how == "model":
        net.compile(options=options)
        return
    for module in (*net.layers, net.head):
        module.forward = torch.compile(module.forward, dynamic=False, options=options)
