"""Training steps of other people's Llamas at our sizes: Hugging Face, with liger-kernel, litgpt, torchtitan."""

import importlib
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gpu.sizes import Size
from benchmarks.gpu.trainee import Trainee, draw_tokens, step_of
from lightning_sv.interop.hf import hugging_face_config
from lightning_sv.nn import activated_parameters, flops_per_token, meta_backbone


class Missing(Exception):
    """A peer that is not installed, or does not fit what is."""


def peer(name: str, size: Size, batch: int, device: torch.device, *, compile_it: bool = True) -> Trainee:
    """Return the peer of this name with float32 weights, bf16 autocast and the same optimizer as ours.

    Raises:
        Missing: it cannot be imported here.
    """
    try:
        loss, model = PEERS[name](size, draw_tokens(size, batch, device), device, compile_it)
    except ImportError as error:
        raise Missing(f"not installed ({error})") from error
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens = batch * size.seq_len
    activated = activated_parameters(meta_backbone(size.config), size.config)
    flops = flops_per_token(activated, size.config, size.seq_len) * tokens
    return Trainee(name, step_of(loss, model, optimizer, device), flops, tokens, model)


Made = tuple[Callable[[], Tensor], nn.Module]


def _hugging_face(size: Size, block: Tensor, device: torch.device, compile_it: bool) -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**hugging_face_config(size.config, size.seq_len), attn_implementation="sdpa")
    with torch.device(device):
        model = LlamaForCausalLM(config).to(device).train()
    tokens, targets = block[:, :-1].contiguous(), block[:, 1:].contiguous()

    def loss() -> Tensor:
        logits = model(input_ids=tokens, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    return loss, model


def _hugging_face_compiled(size: Size, block: Tensor, device: torch.device, compile_it: bool) -> Made:
    loss, model = _hugging_face(size, block, device, compile_it)
    return torch.compile(loss, dynamic=False) if compile_it else loss, model  # loss and model in one graph


def _hugging_face_liger(size: Size, block: Tensor, device: torch.device, compile_it: bool) -> Made:
    from transformers.models.llama import modeling_llama

    apply: Any = importlib.import_module("liger_kernel.transformers").apply_liger_kernel_to_llama
    _, model = _hugging_face(size, block, device, compile_it)
    # It changes the whole module, and with it the other Llamas of this process: that is undone, but in its own steps.
    theirs = {name: getattr(modeling_llama, name) for name in ("apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP")}
    with patch.multiple(modeling_llama, **theirs):
        apply(model=model)
        rotate = modeling_llama.apply_rotary_pos_emb
    tokens = block[:, :-1].contiguous()

    def loss() -> Tensor:
        with patch.object(modeling_llama, "apply_rotary_pos_emb", rotate):
            # It shifts the labels itself: its fused loss never makes the logits.
            value: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return value

    return loss, model


def _litgpt(size: Size, block: Tensor, device: torch.device, compile_it: bool) -> Made:
    config_of: Any = importlib.import_module("litgpt.config").Config
    model_of: Any = importlib.import_module("litgpt.model").GPT
    ours = size.config
    config = config_of(
        name="peer", block_size=size.seq_len, n_layer=ours.n_layer, n_embd=ours.d_model, n_head=ours.n_head,
        vocab_size=ours.vocab_size, padded_vocab_size=ours.vocab_size, intermediate_size=ours.ffn_width,
        rotary_percentage=1.0, parallel_residual=False, bias=False, norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
    )  # fmt: skip
    with torch.device(device):
        model: nn.Module = model_of(config).to(device).train()
    tokens, targets = block[:, :-1].contiguous(), block[:, 1:].contiguous()

    def loss() -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())

    return torch.compile(loss, dynamic=False) if compile_it else loss, model


def _torchtitan(size: Size, block: Tensor, device: torch.device, compile_it: bool) -> Made:
    importlib.import_module("torchtitan.models.llama3")
    raise Missing("it is installed, and not measured: its trainer owns the step")


#: name -> builder(size, block of token ids, device, compile) of the loss and the model
PEERS: dict[str, Callable[[Size, Tensor, torch.device, bool], Made]] = {
    "Hugging Face": _hugging_face,
    "Hugging Face compiled": _hugging_face_compiled,
    "Hugging Face liger": _hugging_face_liger,
    "litgpt compiled": _litgpt,
    "torchtitan": _torchtitan,
}
