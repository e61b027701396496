"""Sampling from a trained backbone."""

import torch
from torch import Tensor

from lightning_sv.nn import Backbone


@torch.no_grad()
def generate(
    model: Backbone,
    prompt: list[int],
    n_tokens: int,
    *,
    context: int,
    temperature: float = 0.8,
    top_k: int | None = 50,
    eot: int | None = None,
    seed: int = 0,
) -> list[int]:
    """Sample a continuation of `prompt`, without the prompt.

    Args:
        model: maps token ids (1, T) to logits (1, T, vocab_size)
        prompt: token ids; at least one
        n_tokens: tokens to sample at most
        context: tokens the model looks back on, normally the length it was trained with
        temperature: logits are divided by it; 0 takes the most likely token
        top_k: sample among this many most likely tokens; None for all
        eot: stop at this token
        seed: of the sampling

    Raises:
        ValueError: n_tokens, top_k or temperature is out of range
    """
    assert prompt, "at least one token"
    if n_tokens < 1 or temperature < 0 or (top_k is not None and top_k < 1):
        raise ValueError(
            f"tokens {n_tokens} and top_k {top_k} must be at least 1, and temperature {temperature} at least 0."
        )
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    for _ in range(n_tokens):
        tokens = torch.tensor([ids[-context:]])
        logits = model(tokens)[0, -1].float()
        token = _sample(logits, temperature, top_k, generator)
        if token == eot:
            break
        ids.append(token)
    return ids[len(prompt) :]


def _sample(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], float("-inf"))
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
