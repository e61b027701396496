"""Continuations of a prompt."""

from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor, nn

from lightning_sv.corpus import Tokenizer
from lightning_sv.lit.generate import Sampling, generate

WORDS = {"<unk>": 0, "</s>": 1, "▁of": 2, "▁the": 3}


class Fixed(nn.Module):
    """Continues with 'the the' and the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 1)

    def forward(self, tokens: Tensor, documents: Any) -> Tensor:
        following = 3 if (tokens == 3).sum() < 2 else 1
        return torch.eye(4)[following].expand(1, tokens.shape[1], 4)


@pytest.mark.parametrize(("prompt", "expected"), [("of", " the the"), ("", "the the")])
def test_continuation_keeps_its_first_space(prompt: str, expected: str) -> None:
    library: Any = tokenizers.Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(library.to_str().encode(), "tokenizer.json")
    model: Any = Fixed()
    for temperature in (0, 1e-300):
        assert (
            generate(model, tokenizer, prompt, Sampling(9, temperature=temperature), context=8)
            == expected
        )
