"""Steps of other Llamas at our sizes: Hugging Face, liger-kernel, litgpt, torchtitan."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks.gpu.sizes import Size
from benchmarks.gpu.trainee import Trainee, draw_tokens, step_of
from benchmarks.peers import VARIANTS, Builder, hugging_face, litgpt, torchtitan
from lightning_sv.nn import activated_parameters, flops_per_token, meta_backbone


class Missing(Exception):
    """A peer that is not installed."""


def peer(
    name: str, size: Size, batch: int, device: torch.device, *, compile_it: bool = True
) -> Trainee:
    """Return the peer of this name with float32 weights, bf16 autocast and our optimizer.

    Raises:
        Missing: it cannot be imported.
    """
    try:
        loss, model = PEERS[name](size, draw_tokens(size, batch, device), device, compile_it)
    except ImportError as error:
        raise Missing(f"not installed ({error})") from error
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    tokens = batch * size.seq_len
    activated = activated_parameters(meta_backbone(size.config), size.config)
    flops = flops_per_token(activated, size.config, size.seq_len) * tokens
    return Trainee(name, step_of(loss, model, optimizer, device), flops, tokens, model)


Made = tuple[Callable[[], Tensor], nn.Module]


def _of(build: Builder, size: Size, block: Tensor, device: torch.device, compile_it: bool) -> Made:
    with torch.device(device):
        theirs = build(size.config, size.seq_len)
    theirs.model.to(device).train()
    tokens = block[:, :-1].contiguous()
    targets = block[:, 1:].contiguous()

    def loss() -> Tensor:
        return theirs.loss(tokens, targets)

    return torch.compile(
        loss, dynamic=False
    ) if compile_it else loss, theirs.model  # loss and model in one graph


def _hugging_face_liger(size: Size, block: Tensor, device: torch.device, compile_it: bool) -> Made:
    from transformers.models.llama import modeling_llama

    apply: Any = importlib.import_module("liger_kernel.transformers").apply_liger_kernel_to_llama
    _, model = _of(hugging_face, size, block, device, compile_it=False)
    # liger-kernel patches the module, and thereby other Llamas of this process; it is undone except
    # in its own steps.
    theirs = {
        name: getattr(modeling_llama, name)
        for name in ("apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP")
    }
    with patch.multiple(modeling_llama, **theirs):
        apply(model=model)
        rotate = modeling_llama.apply_rotary_pos_emb
    tokens = block[:, :-1].contiguous()

    def loss() -> Tensor:
        with patch.object(modeling_llama, "apply_rotary_pos_emb", rotate):
            # The model shifts the labels itself, because its fused loss never computes the full
            # logits.
            value: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return value

    return loss, model


#: name -> builder(size, block of token ids, device, compile) of the loss and the model
PEERS: dict[str, Callable[[Size, Tensor, torch.device, bool], Made]] = {
    "Hugging Face": lambda *given: _of(hugging_face, *given[:3], compile_it=False),
    "Hugging Face compiled": partial(_of, hugging_face),
    "Hugging Face liger": _hugging_face_liger,
    "litgpt compiled": partial(_of, litgpt),
    "torchtitan compiled": partial(_of, torchtitan),
    "litgpt compiled, loss in one": partial(_of, VARIANTS["litgpt, loss in one"]),
}
