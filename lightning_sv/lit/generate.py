"""Sampling text from a trained backbone."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sv.corpus import Tokenizer
from lightning_sv.errors import expect
from lightning_sv.nn import Backbone, document_ids


@dataclass(frozen=True)
class Sampling:
    """Sampling options; a private generator makes equal seeds give equal text.

    Args:
        tokens: maximum number of tokens; sampling stops at an end-of-text token
        temperature: divisor of the logits; 0 for the most likely token
        top_k: number of most likely tokens to sample from; None for all
        seed: random seed

    Raises:
        ConfigError: a number out of range
    """

    tokens: int
    temperature: float = 0.8
    top_k: int | None = 50
    seed: int = 0

    def __post_init__(self) -> None:
        expect(self.tokens >= 1, "tokens", self.tokens, "at least 1.")
        expect(self.top_k is None or self.top_k >= 1, "top_k", self.top_k, "at least 1.")
        expect(
            0 <= self.temperature < math.inf,
            "temperature",
            self.temperature,
            "a finite number of at least 0.",
        )


@torch.no_grad()
def generate(
    model: Backbone,
    tokenizer: Tokenizer,
    prompt: str,
    sampling: Sampling,
    *,
    context: int,
    mask_documents: bool = False,
    broadcast: Callable[[int], int] = int,
) -> str:
    """Return the continuation of `prompt`, without the prompt.

    Args:
        model: model that maps token ids (1, T) to logits (1, T, vocab_size)
        tokenizer: tokenizer of the training text; padding rows of the vocabulary are never sampled
        prompt: text; empty for the start of a document
        sampling: sampling options
        context: number of previous tokens the model sees, normally the training length
        mask_documents: restrict attention to the document, as in training
        broadcast: function that returns the first device's token on every device. Rounding may
            differ between devices, and those of a sharded model need equally many forward passes
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    start = [tokenizer.eot, *tokenizer.encode(prompt)]
    ids = list(start)
    for _ in range(sampling.tokens):
        tokens = torch.tensor([ids[-context:]], device=model.embed.weight.device)
        documents = document_ids(tokens, tokenizer.eot) if mask_documents else None
        logits = model(tokens, documents)[0, -1, : tokenizer.vocab_size].float().cpu()
        token = broadcast(_draw(logits, sampling, generator))
        if token == tokenizer.eot:
            break
        ids.append(token)
    before = tokenizer.decode(start[1:])
    text = tokenizer.decode(ids[1:])
    if text.startswith(before):
        # The continuation alone would lose its first space in tokenizers such as Llama 2's.
        return text.removeprefix(before)
    return tokenizer.decode(ids[len(start) :])


def _draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    if sampling.temperature == 0:
        return int(logits.argmax())
    if sampling.top_k is not None and sampling.top_k < logits.numel():
        least = logits.topk(sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < least, float("-inf"))
    distances = (logits - logits.max()).double()  # at most 0, so that none overflows
    logits = (distances / sampling.temperature).to(logits.dtype)
    return int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
