"""Tokenizers, each with a canonical file that defines it."""

import base64
import hashlib
import json
import os
import unicodedata
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import tiktoken
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from lightning_sv.errors import ConfigError

END_OF_TEXT = "<|endoftext|>"
# Names of the end-of-text token in published tokenizers. The first match is used if neither
# the settings nor the files next to the tokenizer name one.
_END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "<|end▁of▁sentence|>", "</s>", "<eos>", "[EOS]", "[SEP]")
# sha256 of GPT-2's 50,256 byte-pair ranks, in tiktoken's own file format.
GPT2_RANKS_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
_GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
_MAX_FILE_BYTES = 256 << 20
#: transformers files next to a tokenizer.json that name its end token
_NAMES_END = ("tokenizer_config.json", "special_tokens_map.json")


class Tokenizer(ABC):
    """A tokenizer with an end-of-text token; byte-level ones satisfy decode(encode(x)) == x.

    Text is always plain text: the spelling of a special token is encoded as letters, not as the token.

    Attributes:
        filename: name of its canonical file inside a corpus
        vocab_size: one more than the largest id
        eot: id of the end-of-text token
        content: bytes of the canonical file
    """

    filename: ClassVar[str]
    vocab_size: int
    eot: int
    content: bytes

    @property
    def eot_token(self) -> str:
        """Name of the end-of-text token."""
        return self.decode([self.eot])

    @property
    def unknown(self) -> int | None:
        """Id of the token for unknown text; None if there is none."""
        return None

    def encode(self, text: str) -> list[int]:
        """Return the ids of one text, without the end-of-text token."""
        ids: list[int] = self.encode_batch([text])[0].tolist()
        return ids

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of many texts, each 1-D and of `dtype`; the library uses all cores."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a sequence of ids; special tokens are spelled out."""

    def lost_share(self, text: str, ids: Sequence[int]) -> float:
        """Return the fraction of a text's bytes that decoding its ids does not restore.

        White space, case and compatibility forms do not count, because many tokenizers normalize them.
        """
        decoded = self.decode([i for i in ids if i != self.unknown])
        if decoded == text:
            return 0.0
        before, after = _characters(text), _characters(decoded)
        return _n_bytes(before - after) / max(1, _n_bytes(before))

    @property
    def sha256(self) -> str:
        """sha256 of the canonical file, equal for tokenizers made from the same data."""
        return hashlib.sha256(self.content).hexdigest()

    @property
    def dtype(self) -> np.dtype:
        """uint16 up to 65,536 ids, uint32 above."""
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    def save(self, folder: str | Path) -> Path:
        """Write the canonical file, and the end token's name if it is unusual; return the file's path."""
        path = Path(folder) / self.filename
        path.write_bytes(self.content)
        if self.eot_token != END_OF_TEXT:
            path.with_name(_NAMES_END[0]).write_text(json.dumps({"eos_token": self.eot_token}))
        return path

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        """Read the tokenizer of a prepared corpus."""
        for kind in (JsonTokenizer, RanksTokenizer):
            if (path := Path(folder) / kind.filename).is_file():
                return kind(read_limited(path), str(path), _named_end(path.parent))
        raise ConfigError(f"{folder} has neither tokenizer.json nor gpt2.tiktoken; prepare the corpus again.")


class JsonTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library; its canonical file is the tokenizer.json, byte for byte."""

    filename = "tokenizer.json"

    def __init__(self, raw: bytes, where: str, eot: str | None = None) -> None:
        """Read a tokenizer.json, named `where` in errors; without `eot`, use the first common end-of-text token."""
        try:
            tokenizer = tokenizers.Tokenizer.from_buffer(raw)
        except BaseException as error:  # the library raises ValueError, a bare Exception, or panics
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ConfigError(f"{where} is not a tokenizer.json ({error}); check the path.") from None
        self._tokenizer, self.content = tokenizer, raw
        tokenizer.encode_special_tokens = True  # encode special tokens in the text as text
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.vocab_size = max(tokenizer.get_vocab().values(), default=0) + 1
        names = _END_OF_TEXT_NAMES if eot is None else (eot,)
        eot_id = next((i for name in names if (i := tokenizer.token_to_id(name)) is not None), None)
        if eot_id is None:
            raise ConfigError(
                f"{where} has no end-of-text token {' '.join(names)}; set data.corpus.eot to the name of one of its "
                "tokens."
            )
        self.eot = eot_id

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "JsonTokenizer":
        """Train a byte-level BPE: 256 bytes, the end-of-text token (id 0) and vocab_size - 257 merges."""
        tokenizer = tokenizers.Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        if (size := tokenizer.get_vocab_size()) < vocab_size:
            raise ConfigError(
                f"tokenizer is bpe:{vocab_size}; expected at most bpe:{size}, which is all that this text supports. "
                "Add text or use a smaller size."
            )
        return cls(tokenizer.to_str().encode(), f"bpe:{vocab_size}")

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of many texts, each 1-D and of `dtype`; the library uses all cores."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self.dtype) for encoding in encodings]

    @property
    def eot_token(self) -> str:
        """Name of the end-of-text token."""
        return str(self._tokenizer.id_to_token(self.eot))

    @cached_property
    def unknown(self) -> int | None:  # type: ignore[override]
        """Id of the token for unknown text; None if there is none."""
        model = json.loads(self.content)["model"]
        name = model.get("unk_token")
        if name is None:
            unigram_id: int | None = model.get("unk_id")
            return unigram_id
        return self._tokenizer.token_to_id(name)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a sequence of ids; special tokens are spelled out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


class RanksTokenizer(Tokenizer):
    """GPT-2 on tiktoken, from its table of ranks; the canonical file lists `base64(token) rank`."""

    filename = "gpt2.tiktoken"

    def __init__(self, raw: bytes, where: str, eot: str | None = None) -> None:
        """Read a file of GPT-2's ranks, named `where` in errors; others need a different splitting pattern."""
        try:
            rows = (line.split() for line in raw.splitlines() if line)
            ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in rows}
        except ValueError:
            ranks = {}
        self.content = _dump_ranks(ranks)
        if self.sha256 != GPT2_RANKS_SHA256:
            raise ConfigError(
                f"{where} does not have GPT-2's ranks; use the gpt2.tiktoken of the openai-whisper sources "
                "(in whisper/assets), or a tokenizer.json."
            )
        self.eot = len(ranks)
        self.vocab_size = self.eot + 1
        special = {END_OF_TEXT: self.eot}
        self._encoding = tiktoken.Encoding("gpt2", pat_str=_GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special)

    @classmethod
    def download(cls) -> "RanksTokenizer":
        """Return GPT-2, downloaded or cached by tiktoken."""
        try:
            encoding = tiktoken.get_encoding("gpt2")
        except Exception as error:  # requests' errors, and others with a damaged cache
            raise ConfigError(
                "tokenizer=gpt2 could not be downloaded; without a network, set tokenizer to the path of a "
                "gpt2.tiktoken file (in whisper/assets of the openai-whisper sources)."
            ) from error
        ranks = {encoding.decode_single_token_bytes(rank): rank for rank in range(encoding.eot_token)}
        return cls(_dump_ranks(ranks), "tokenizer=gpt2")

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of many texts, each 1-D and of `dtype`; the library uses all cores."""
        encoded = self._encoding.encode_ordinary_batch(list(texts), num_threads=os.cpu_count() or 1)
        return [np.array(ids, dtype=self.dtype) for ids in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a sequence of ids; special tokens are spelled out."""
        return self._encoding.decode(list(ids))


def bpe_size(spec: str) -> int | None:
    """Return N of 'bpe:N', None for any other specification."""
    if not spec.startswith("bpe:"):
        return None
    number = spec.removeprefix("bpe:").replace(",", "").replace("_", "")
    size = int(number) if number.isdecimal() else 0
    if not 257 <= size <= 1 << 20:
        raise ConfigError(f"tokenizer is {spec!r}; expected a size from 257 (all bytes) to 1,048,576.")
    return size


def open_tokenizer(spec: str, eot: str | None = None) -> Tokenizer:
    """Return a tokenizer that needs no training: 'gpt2', a tokenizer.json or a *.tiktoken file.

    Args:
        spec: name or path
        eot: name of the end-of-text token; None for the name in the files next to a tokenizer.json

    Raises:
        ConfigError: a missing file, a file of another kind, no end-of-text token, or GPT-2 without a network
    """
    if spec == "gpt2":
        return RanksTokenizer.download()
    path = Path(spec).expanduser()
    raw = read_limited(path)
    if path.suffix == ".tiktoken":
        return RanksTokenizer(raw, f"tokenizer={spec}")
    return JsonTokenizer(raw, f"tokenizer={spec}", eot or _named_end(path.parent))


def canonical_sha256(spec: str) -> str:
    """Return the hash of the canonical file of a tokenizer.json or *.tiktoken file."""
    path = Path(spec).expanduser()
    if path.suffix == ".tiktoken":
        return open_tokenizer(spec).sha256
    return hashlib.sha256(read_limited(path)).hexdigest()


def check_end(tokenizer: Tokenizer, eot: str | None) -> None:
    """Check that a tokenizer's end-of-text token is that of the settings, if they name one."""
    if eot is not None and tokenizer.eot_token != eot:
        raise ConfigError(
            f"eot is {eot!r}; expected {tokenizer.eot_token!r} or null. It can be set for a tokenizer.json only."
        )


def _named_end(folder: Path) -> str | None:
    for path in (folder / name for name in _NAMES_END):
        try:
            settings = json.loads(read_limited(path)) if path.is_file() else {}
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: invalid JSON ({error}); repair or remove it.") from None
        token = settings.get("eos_token") if isinstance(settings, dict) else None
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            return token
    return None


def _dump_ranks(ranks: dict[bytes, int]) -> bytes:
    rows = sorted((rank, token) for token, rank in ranks.items())
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in rows)


def read_limited(path: Path) -> bytes:
    """Return the bytes of a tokenizer file, unless it is too large to be one."""
    if not path.is_file():
        raise ConfigError(f"tokenizer={path} does not exist; expected 'bpe:N', 'gpt2' or the path of a file.")
    if path.stat().st_size > _MAX_FILE_BYTES:
        raise ConfigError(
            f"{path} is too large for a tokenizer; expected at most {_MAX_FILE_BYTES:,} bytes. Check the path."
        )
    return path.read_bytes()


def _characters(text: str) -> Counter[str]:
    return Counter("".join(unicodedata.normalize("NFKD", text).casefold().split()))


def _n_bytes(characters: Counter[str]) -> int:
    return sum(len(character.encode()) * number for character, number in characters.items())
