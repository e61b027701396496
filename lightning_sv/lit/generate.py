"""Sampling text from a trained backbone."""

import torch

from lightning_sv.corpus import Tokenizer
from lightning_sv.nn import Backbone


@torch.no_grad()
def generate(
    model: Backbone,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    tokens: int,
    context: int,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
) -> str:
    """Return the continuation of `prompt`, without the prompt; equal seeds give equal text.

    Args:
        model: model that maps token ids (1, T) to logits (1, T, vocab_size)
        tokenizer: tokenizer of the training text; padding rows of the vocabulary are never sampled
        prompt: text; empty for the start of a document
        tokens: maximum number of tokens; sampling stops at an end-of-text token
        context: number of previous tokens the model sees, normally the training length
        temperature: divisor of the logits; 0 for the most likely token
        top_k: number of most likely tokens to sample from
        seed: random seed of a private generator
    """
    generator = torch.Generator().manual_seed(seed)
    start = [tokenizer.eot, *tokenizer.encode(prompt)]
    ids = list(start)
    for _ in range(tokens):
        seen = torch.tensor([ids[-context:]], device=model.embed.weight.device)
        logits = model(seen)[0, -1, : tokenizer.vocab_size].float().cpu()
        best = logits.topk(min(top_k if temperature else 1, len(logits)))
        weights = (best.values / (temperature or 1)).softmax(-1)
        token = int(best.indices[torch.multinomial(weights, 1, generator=generator)])
        if token == tokenizer.eot:
            break
        ids.append(token)
    return tokenizer.decode(ids[len(start) :])
