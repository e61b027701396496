"""Other Llamas at our sizes: Hugging Face, litgpt, torchtitan, with an equivalent loss.

Each is built with its library's classes, without biases and tied weights, as in its own
pretraining; if a library has an alternative that may be faster, that is a variant.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest.mock import MagicMock

from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sv.interop.hf.configs import arguments
from lightning_sv.interop.hf.families import Target
from lightning_sv.nn import BackboneConfig


@dataclass(frozen=True)
class Peer:
    """A Llama of another library.

    Attributes:
        model: module with the parameters.
        loss: (B, T) tokens, (B, T) targets -> mean cross-entropy in nats, computed in float32.
        load: function that loads the weights of a LlamaForCausalLM of the same sizes, with its
            names.
    """

    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    load: Callable[[Mapping[str, Tensor]], object]


def hugging_face(config: BackboneConfig, seq_len: int) -> Peer:
    """Return LlamaForCausalLM with PyTorch's attention; its own loss would copy the targets."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(**arguments(config, Target("Llama"), seq_len), attn_implementation="sdpa")
    )

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        logits = model(input_ids=tokens, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    return Peer(model, loss, model.load_state_dict)


def litgpt(config: BackboneConfig, seq_len: int, *, chunk: int = 128) -> Peer:
    """Return litgpt's GPT with its own loss on full logits, `chunk` tokens at a time."""
    config_of: Any = importlib.import_module("litgpt.config").Config
    model_of: Any = importlib.import_module("litgpt.model").GPT
    chunked: Any = importlib.import_module("litgpt.utils").chunked_cross_entropy
    theirs = config_of(
        name="peer", block_size=seq_len, n_layer=config.n_layer, n_embd=config.d_model, n_head=config.n_head,
        vocab_size=config.vocab_size, padded_vocab_size=config.vocab_size, intermediate_size=config.ffn_width,
        rotary_percentage=1.0, rope_base=round(config.rope_theta), parallel_residual=False, bias=False,
        norm_class_name="RMSNorm", norm_eps=config.norm_eps, mlp_class_name="LLaMAMLP",
    )  # fmt: skip
    model: nn.Module = model_of(theirs)

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        value: Tensor = chunked(model(tokens).float(), targets, chunk_size=chunk)
        return value

    def load(weights: Mapping[str, Tensor]) -> object:
        copy: Any = importlib.import_module(
            "litgpt.scripts.convert_hf_checkpoint"
        ).copy_weights_hf_llama
        state: dict[str, Tensor] = {}
        copy(theirs, {}, state, dict(weights))
        return model.load_state_dict(state)

    return Peer(model, loss, load)


def torchtitan(config: BackboneConfig, seq_len: int, *, fuse_qkv: bool = True) -> Peer:
    """Return torchtitan's Llama 3 with its own loss and its wrapper of PyTorch's attention.

    Its default, flex attention, is for document masks and has no backward pass on a CPU.
    """
    importlib.import_module("torchtitan")
    if find_spec("triton") is None:  # needed only by kernels of distributed experts
        sys.modules.setdefault("torchtitan.distributed.minimal_async_ep.kernels", MagicMock())
    llama: Any = importlib.import_module("torchtitan.models.llama3")
    block: Any = importlib.import_module("torchtitan.models.llama3.model").Llama3TransformerBlock
    common: Any = importlib.import_module("torchtitan.models.common")
    make: Any = importlib.import_module("torchtitan.models.common.config_utils")
    attention: Any = importlib.import_module(
        "torchtitan.models.common.attention"
    ).ScaledDotProductAttention
    summed: Any = importlib.import_module("torchtitan.components.loss").cross_entropy_loss
    d = config.d_model
    vocab_size = config.vocab_size
    norm = common.RMSNorm.Config(normalized_shape=d, eps=config.norm_eps)
    rope = common.ComplexRoPE.Config(
        dim=config.head_width, max_seq_len=seq_len, theta=config.rope_theta
    )
    layer = block.Config(
        attention_norm=norm, ffn_norm=norm,
        attention=make.make_gqa_config(
            dim=d, n_heads=config.n_head, wqkv_param_init={}, wo_param_init={}, inner_attention=attention.Config(),
            rope=rope, fuse_qkv=fuse_qkv,
        ),
        feed_forward=make.make_ffn_config(dim=d, hidden_dim=config.ffn_width, w1_param_init={}, w2w3_param_init={}),
    )  # fmt: skip
    theirs = llama.Llama3Model.Config(
        dim=d, vocab_size=vocab_size, norm=norm, layers=[layer] * config.n_layer,
        tok_embeddings=common.Embedding.Config(num_embeddings=vocab_size, embedding_dim=d),
        lm_head=common.Linear.Config(in_features=d, out_features=vocab_size),
    )  # fmt: skip
    model: nn.Module = theirs.build()

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        value: Tensor = summed(model(tokens), targets) / targets.numel()
        return value

    def load(weights: Mapping[str, Tensor]) -> object:
        return model.load_state_dict(
            llama.Llama3StateDictAdapter(theirs, None).from_hf(dict(weights))
        )

    return Peer(model, loss, load)


Builder = Callable[[BackboneConfig, int], Peer]
#: name -> builder(sizes, longest sequence), which raises ImportError if the peer cannot be imported
PEERS: dict[str, Builder] = {
    "Hugging Face": hugging_face,
    "litgpt": litgpt,
    "torchtitan": torchtitan,
}
#: further variants, measured on request
VARIANTS: dict[str, Builder] = {
    "litgpt, loss in one": partial(litgpt, chunk=0),
    "torchtitan, q, k, v apart": partial(torchtitan, fuse_qkv=False),
}
