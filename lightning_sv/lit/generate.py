"""Sampling text from a trained backbone."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sv.corpus import Tokenizer
from lightning_sv.errors import ConfigError
from lightning_sv.nn import Backbone


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, from a generator of their own: the same seed, the same text.

    Args:
        tokens: to draw at most; an end of text ends it
        temperature: logits are divided by it; 0 takes the most likely token
        top_k: draw among this many most likely tokens; None for all
        seed: of the drawing

    Raises:
        ConfigError: a number out of range
    """

    tokens: int
    temperature: float = 0.8
    top_k: int | None = 50
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 1 or not 0 <= self.temperature < math.inf or (self.top_k is not None and self.top_k < 1):
            raise ConfigError(
                f"tokens {self.tokens} and top_k {self.top_k} must be at least 1, and temperature {self.temperature} "
                "finite and at least 0."
            )


@torch.no_grad()
def generate(model: Backbone, tokenizer: Tokenizer, prompt: str, sampling: Sampling, *, context: int) -> str:
    """Continue `prompt`; return the continuation without it.

    Args:
        model: maps token ids (1, T) to logits (1, T, vocab_size)
        tokenizer: that of its text; a vocabulary that is padded beyond it is not drawn from
        prompt: text; empty for the start of a document
        sampling: how to draw
        context: tokens the model looks back on, normally the length it was trained with
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    start = [tokenizer.eot, *tokenizer.encode(prompt)]
    ids = list(start)
    for _ in range(sampling.tokens):
        tokens = torch.tensor([ids[-context:]], device=model.embed.weight.device)
        logits = model(tokens)[0, -1, : tokenizer.vocab_size].float().cpu()
        token = _draw(logits, sampling, generator)
        if token == tokenizer.eot:
            break
        ids.append(token)
    return tokenizer.decode(ids[len(start) :])


def _draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    if sampling.temperature == 0:
        return int(logits.argmax())
    if sampling.top_k is not None and sampling.top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], float("-inf"))
    return int(torch.multinomial((logits / sampling.temperature).softmax(-1), 1, generator=generator))
