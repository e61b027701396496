"""Conversion of a corpus's tokenizer to transformers."""

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from lightning_sv.corpus.tokenizer import Tokenizer, read_file
from lightning_sv.errors import ConfigError
from lightning_sv.roles.fake import transformers

#: text on which byte-level tokenizers differ
_SAMPLE = "def f(x):\n\treturn  x + 12345  # it's naïve, 你好 🙂\n\n\n"


def fast_tokenizer(tokenizer: Tokenizer, context: int) -> Any:
    """Return a PreTrainedTokenizerFast with the same ids; texts start with the end-of-text token, as in training.

    Args:
        tokenizer: tokenizer of the corpus
        context: maximum text length

    Raises:
        ConfigError: transformers is not installed, or its ids differ
    """
    converted = tokenizers.Tokenizer.from_buffer(tokenizer.content)
    end = converted.id_to_token(tokenizer.eot)
    pieces = processors.TemplateProcessing(
        single=f"{end} $A", pair=f"{end} $A {end} $B", special_tokens=[(end, tokenizer.eot)]
    )
    converted.post_processor = pieces
    converted.no_truncation()
    converted.no_padding()
    # The folder stores the name of the class; transformers 5 has a different one, which version 4 cannot load.
    kind: Any = type("PreTrainedTokenizerFast", (transformers().PreTrainedTokenizerFast,), {})
    theirs = kind(
        tokenizer_object=converted, bos_token=end, eos_token=end, pad_token=end, model_max_length=context,
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip
    expected, actual = [tokenizer.eot, *tokenizer.encode(_SAMPLE)], theirs(_SAMPLE)["input_ids"]
    if actual != expected:
        raise ConfigError(
            f"the tokenizer cannot be exported: in transformers, {_SAMPLE!r} becomes {actual}; expected {expected}."
        )
    return theirs


def check_same_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Check that a corpus has the tokenizer of a transformers model, if its folder has one.

    Args:
        tokenizer: tokenizer of the corpus
        folder: folder of the model

    Raises:
        ConfigError: the ids differ
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return
    theirs = Tokenizer(read_file(path), str(path), tokenizer.eot_token)
    if theirs.encode(_SAMPLE) != tokenizer.encode(_SAMPLE) or theirs.vocab_size != tokenizer.vocab_size:
        raise ConfigError(
            f"the tokenizer of the corpus differs from that of {folder}; prepare the corpus with "
            f"--data.corpus.tokenizer {path}."
        )
