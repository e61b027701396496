"""The tokenizer of a corpus as transformers'."""

import tempfile
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from lightning_sv.corpus.tokenizer import END_OF_TEXT, JsonTokenizer, Tokenizer, read_limited
from lightning_sv.errors import ConfigError
from lightning_sv.interop.hf.convert import transformers

#: what byte-level tokenizers disagree on
_SAMPLE = "def f(x):\n\treturn  x + 12345  # it's naïve, 你好 🙂\n\n\n"


def fast_tokenizer(tokenizer: Tokenizer, context: int) -> Any:
    """Return a PreTrainedTokenizerFast with the same ids; a text begins with the end-of-text token, as in training.

    Args:
        tokenizer: of the corpus
        context: the longest text

    Raises:
        ConfigError: transformers is not installed, or gives other ids
    """
    own = isinstance(tokenizer, JsonTokenizer)
    made = tokenizers.Tokenizer.from_buffer(tokenizer.to_bytes()) if own else _gpt2(tokenizer)
    end = made.id_to_token(tokenizer.eot)
    pieces = processors.TemplateProcessing(
        single=f"{end} $A", pair=f"{end} $A {end} $B", special_tokens=[(end, tokenizer.eot)]
    )
    made.post_processor = pieces
    made.no_truncation()
    made.no_padding()
    # version 5 has another name for this class, which version 4 does not know; a folder holds the name
    kind: Any = type("PreTrainedTokenizerFast", (transformers().PreTrainedTokenizerFast,), {})
    theirs = kind(
        tokenizer_object=made, bos_token=end, eos_token=end, pad_token=end, model_max_length=context,
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip
    expected, found = [tokenizer.eot, *tokenizer.encode(_SAMPLE)], theirs(_SAMPLE)["input_ids"]
    if found != expected:
        raise ConfigError(
            f"the tokenizer cannot be exported: as transformers' it gives {found} for {_SAMPLE!r}, and not {expected}."
        )
    return theirs


def check_same_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Check that a corpus was encoded with the tokenizer of a transformers model, where that has one beside it.

    Args:
        tokenizer: of the corpus
        folder: of the model

    Raises:
        ConfigError: they give different ids
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return
    theirs = JsonTokenizer.from_bytes(read_limited(path), str(path), tokenizer.eot_token)
    if theirs.encode(_SAMPLE) != tokenizer.encode(_SAMPLE) or theirs.vocab_size != tokenizer.vocab_size:
        raise ConfigError(
            f"the corpus was made with another tokenizer than that of {folder}; prepare it with "
            f"--data.corpus.tokenizer {path}."
        )


def _gpt2(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """Build GPT-2 from its ranks."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    with tempfile.NamedTemporaryFile(suffix=".tiktoken") as file:
        file.write(tokenizer.to_bytes())
        file.flush()
        vocabulary, merges = TikTokenConverter().extract_vocab_merges_from_model(file.name)
    made = tokenizers.Tokenizer(models.BPE(vocabulary, merges, fuse_unk=False, ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([END_OF_TEXT])
    return made
