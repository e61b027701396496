"""Tokenizers of corpora: trained, from a tokenizer.json, or GPT-2's."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import fastokens
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from lightning_sv.atomic import atomic_path, read_json, write_atomically
from lightning_sv.errors import ConfigError, expect

END_OF_TEXT = "<|endoftext|>"
# Names of the end-of-text token in published tokenizers. The first match is used if neither
# the settings nor the file next to the tokenizer name one.
_BAR = "\N{FULLWIDTH VERTICAL LINE}"  # DeepSeek writes it instead of |
_END_OF_TEXT_NAMES = (
    END_OF_TEXT,
    "<|end_of_text|>",
    "<|end▁of▁sentence|>",
    f"<{_BAR}end▁of▁sentence{_BAR}>",
    "</s>",
    "<eos>",
    "[EOS]",
    "[SEP]",
)
#: GPT-2 on the Hugging Face hub
GPT2 = "openai-community/gpt2"
#: characters of a long text that a BPE is trained on at once, up to the start of a word
_PART = 1 << 20
_WORD_START = re.compile(r"[\n ](?=\S)")
# Words of more bytes are cut for the training of a BPE, whose time grows with the square of the
# length: 11 minutes per MB.
_LONGEST_WORD = 4096
# Settings of a BPE that GPT-2's does not have.
_UNUSUAL_BPE = (
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "fuse_unk",
    "byte_fallback",
    "ignore_merges",
)
#: file of transformers next to a tokenizer.json that names its end token
_CONFIG = "tokenizer_config.json"


class Tokenizer:
    """A tokenizer with an end-of-text token, defined by a tokenizer.json of `tokenizers`.

    Text is plain text: the spelling of a special token is encoded as letters, not as the token,
    unless it is a piece of the model itself (Unigram, WordLevel). Byte-level tokenizers satisfy
    decode(encode(x)) == x. BPE's dropout is off.

    Args:
        raw: content of a tokenizer.json, which is kept byte for byte
        where: name of the file in errors
        eot: name or id of the end-of-text token; None for the first common one

    Attributes:
        filename: name of its file in a corpus and in a run
        content: bytes of that file
        vocab_size: one more than the largest id
        eot: id of the end-of-text token

    Raises:
        ConfigError: the content is not a tokenizer.json, or it has no such token
    """

    filename = "tokenizer.json"

    def __init__(self, raw: bytes, where: str, eot: str | int | None = None) -> None:
        tokenizer = _parsed(raw, where)
        self._tokenizer = tokenizer
        self.content = raw
        tokenizer.encode_special_tokens = True  # encode special tokens in the text as text
        if hasattr(tokenizer.model, "dropout"):
            tokenizer.model.dropout = None  # equal settings must give equal corpora
        tokenizer.no_truncation()
        tokenizer.no_padding()
        numbers = tokenizer.get_vocab()
        self.vocab_size = max(numbers.values(), default=0) + 1

        names = list(_END_OF_TEXT_NAMES)
        if isinstance(eot, int):
            eot = tokenizer.id_to_token(eot)
        if isinstance(eot, str):
            names = [eot]
        known = [name for name in names if name in numbers]
        if not known:
            hint = "set data.corpus.eot to the name of one of its tokens."
            raise ConfigError(f"{where} has no end-of-text token {' '.join(names)}; {hint}")
        self.eot = numbers[known[0]]

    def __reduce__(self) -> tuple[Any, ...]:
        return Tokenizer, (self.content, self.filename, self.eot)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Train a byte-level BPE: the end-of-text token (id 0), 256 bytes and the merges."""
        tokenizer = tokenizers.Tokenizer(models.BPE())
        words = pre_tokenizers.ByteLevel(add_prefix_space=False)
        pieces = pre_tokenizers.FixedLength(_LONGEST_WORD)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pieces])
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(chain.from_iterable(map(_parts, texts)), trainer)
        tokenizer.pre_tokenizer = words
        size = tokenizer.get_vocab_size()
        hint = f"Add text, or add --data.corpus.tokenizer bpe:{size}."
        expected = f"at most bpe:{size}, which is all that this text supports. {hint}"
        expect(size >= vocab_size, "tokenizer", f"bpe:{vocab_size}", expected)
        return cls(tokenizer.to_str().encode(), f"bpe:{vocab_size}")

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        """Read the tokenizer of a prepared corpus or of a run."""
        return open_tokenizer(f"{folder}/{cls.filename}")

    @property
    def eot_token(self) -> str:
        """Name of the end-of-text token."""
        return str(self._tokenizer.id_to_token(self.eot))

    def encode(self, text: str) -> list[int]:
        """Return the ids of one text, without the end-of-text token."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of many texts, each 1-D and of `dtype`; the libraries use all cores.

        `tokenizers`, which encodes if `_fast` is None, needs 0.2 GB per MB of a text. The fast
        library raises ValueError for a byte that a byte-level tokenizer lacks.
        """
        if self._fast is None:
            return self._encode(texts)
        ids, offsets = self._fast.encode_batch_flat(list(texts))
        flat = np.frombuffer(ids, np.uint32).astype(self.dtype)
        ends = np.frombuffer(offsets, np.uint64).astype(np.int64)
        return np.split(flat, ends[1:-1])

    def _encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self.dtype) for encoding in encodings]

    @cached_property
    def _fast(self) -> fastokens.Tokenizer | None:
        """The same tokenizer in a faster library; None if it is not like GPT-2's.

        `tests/corpus/test_tokenizer.py` compares the ids on random texts. Names of special tokens
        in a text are letters, as here, because this library is not told of them.
        """
        # with all keys; those of older files, such as GPT-2's on the hub, are fewer
        settings = json.loads(self._tokenizer.to_str())
        if not _is_like_gpt2(settings):
            return None
        plain = settings | {"added_tokens": [], "post_processor": None}
        return fastokens.Tokenizer.from_json_str(json.dumps(plain))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a sequence of ids; special tokens are spelled out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    @property
    def sha256(self) -> str:
        """sha256 of the tokenizer.json, equal for tokenizers made from the same data."""
        return hashlib.sha256(self.content).hexdigest()

    @property
    def dtype(self) -> np.dtype:
        """uint16 up to 65,536 ids, uint32 above."""
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    def save(self, folder: str | Path) -> Path:
        """Write the tokenizer.json, and an unusual end token's name; return the file's path."""
        path = Path(folder) / self.filename
        with atomic_path(path) as partial:
            partial.write_bytes(self.content)
        if self.eot_token != END_OF_TEXT:
            named = json.dumps({"eos_token": self.eot_token})
            write_atomically(path.with_name(_CONFIG), named)
        return path


def _parsed(raw: bytes, where: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_buffer(raw)
    except BaseException as error:  # the library raises ValueError, a bare Exception, or panics
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        found = f"{where} is not a tokenizer.json ({error})"
        raise ConfigError(f"{found}; check the path.") from None


def _is_like_gpt2(settings: Mapping[str, Any]) -> bool:
    """Return True for GPT-2's pattern and a byte-level BPE, of a text as it is."""
    pattern = settings.get("pre_tokenizer") or {}
    gpt2_pattern = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    has_pattern = gpt2_pattern.items() <= pattern.items()
    has_normalizer = settings["normalizer"] is not None
    has_words = any(not token["special"] for token in settings["added_tokens"])
    if has_normalizer or has_words or not has_pattern:
        return False

    model = settings["model"]
    is_unusual = any(map(model.get, _UNUSUAL_BPE))
    return model["type"] == "BPE" and not is_unusual


def _parts(text: str) -> Iterator[str]:
    """Cut a text after about every `_PART` characters, where no token of GPT-2's pattern continues.

    The pattern keeps the white space before the last character of a run together, a line break
    apart from text, and a space with the text after it.
    """
    start = 0
    while start < len(text):
        cut = _WORD_START.search(text, start + _PART)
        end = len(text) if cut is None else cut.start()
        yield text[start:end]
        start = end


def bpe_size(spec: str) -> int | None:
    """Return N of 'bpe:N', None for any other specification."""
    if not spec.startswith("bpe:"):
        return None
    number = spec.removeprefix("bpe:")
    size = int(number) if number.isdecimal() else 0
    expected = "a size from 257 (all bytes) to 1,048,576."
    expect(257 <= size <= 1 << 20, "tokenizer", repr(spec), expected)
    return size


def tokenizer_file(spec: str) -> Path | None:
    """Return the path that a specification names, None for 'bpe:N' and 'gpt2'.

    A folder, such as one that transformers wrote, stands for its tokenizer.json.
    """
    if spec == "gpt2" or bpe_size(spec) is not None:
        return None
    path = Path(spec).expanduser()
    if path.is_dir():
        return path / Tokenizer.filename
    return path


def open_tokenizer(spec: str, eot: str | None = None) -> Tokenizer:
    """Return a tokenizer that needs no training.

    It is a tokenizer.json, or 'gpt2', which the hub's client downloads and caches.
    """
    path = tokenizer_file(spec) or _downloaded_gpt2()
    expect(path.is_file(), "tokenizer", path, "'bpe:N', 'gpt2' or the path of an existing file.")
    return Tokenizer(path.read_bytes(), f"tokenizer={spec}", eot or _named_end(path.parent))


def _downloaded_gpt2() -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(GPT2, Tokenizer.filename))
    except Exception as error:  # errors of the hub, of httpx or of a proxy
        found = f"tokenizer=gpt2 could not be downloaded ({type(error).__name__})"
        hint = f"without a network, set tokenizer to the path of the tokenizer.json of {GPT2}."
        raise ConfigError(f"{found}; {hint}") from error


def _named_end(folder: Path) -> str | None:
    """Return the end token that the file of transformers next to a tokenizer names."""
    path = folder / _CONFIG
    if not path.is_file():
        return None
    token = read_json(path, "repair or remove it.").get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
