"""Tokenizers of corpora: trained, from a tokenizer.json, or GPT-2's."""

import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path

import fastokens
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from lightning_sv.atomic import atomic_path, read_json, write_atomically
from lightning_sv.errors import ConfigError, expect

END_OF_TEXT = "<|endoftext|>"
# Names of the end-of-text token in published tokenizers. The first match is used if neither
# the settings nor the files next to the tokenizer name one.
_BAR = "\N{FULLWIDTH VERTICAL LINE}"  # DeepSeek writes it instead of |
_END_OF_TEXT_NAMES = (
    END_OF_TEXT, "<|end_of_text|>", "<|end▁of▁sentence|>", f"<{_BAR}end▁of▁sentence{_BAR}>",
    "</s>", "<eos>", "[EOS]", "[SEP]",
)  # fmt: skip
#: GPT-2 on the Hugging Face hub
GPT2 = "openai-community/gpt2"
#: characters of a long text that are encoded at once, up to the next of these places
_PART = 1 << 20
_LINE_BREAK = re.compile(r"\n(?=\S)")
_WORD_START = re.compile(r"[\n ](?=\S)")
# Settings of a BPE that GPT-2's does not have.
_UNUSUAL_BPE = (
    "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback",
    "ignore_merges",
)  # fmt: skip
#: transformers files next to a tokenizer.json that name its end token
_END_TOKEN_FILES = ("tokenizer_config.json", "special_tokens_map.json")


class Tokenizer:
    """A tokenizer of the `tokenizers` library with an end-of-text token, defined by a tokenizer.json.

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
        try:
            tokenizer = tokenizers.Tokenizer.from_buffer(raw)
        except BaseException as error:  # the library raises ValueError, a bare Exception, or panics
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ConfigError(
                f"{where} is not a tokenizer.json ({error}); check the path."
            ) from None
        self._tokenizer = tokenizer
        self.content = raw
        tokenizer.encode_special_tokens = True  # encode special tokens in the text as text
        if getattr(tokenizer.model, "dropout", None) is not None:
            tokenizer.model.dropout = None  # equal settings must give equal corpora
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.vocab_size = max(tokenizer.get_vocab().values(), default=0) + 1
        name = tokenizer.id_to_token(eot) if isinstance(eot, int) else eot
        self.eot = self._find_end(where, _END_OF_TEXT_NAMES if name is None else (name,))

    def _find_end(self, where: str, names: Sequence[str]) -> int:
        """Return the id of the first of these tokens that exists."""
        for name in names:
            number: int | None = self._tokenizer.token_to_id(name)
            if number is not None:
                return number
        hint = "set data.corpus.eot to the name of one of its tokens."
        raise ConfigError(f"{where} has no end-of-text token {' '.join(names)}; {hint}")

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
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
        tokenizer.train_from_iterator(chain.from_iterable(map(_parts, texts)), trainer)
        size = tokenizer.get_vocab_size()
        wanted = f"at most bpe:{size}, which is all that this text supports. Add text or use a smaller size."
        expect(size >= vocab_size, "tokenizer", f"bpe:{vocab_size}", wanted)
        return cls(tokenizer.to_str().encode(), f"bpe:{vocab_size}")

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        """Read the tokenizer of a prepared corpus or of a run."""
        path = Path(folder) / cls.filename
        return cls(read_file(path), str(path), _named_end(path.parent))

    @property
    def eot_token(self) -> str:
        """Name of the end-of-text token."""
        return str(self._tokenizer.id_to_token(self.eot))

    @cached_property
    def unknown(self) -> int | None:
        """Id of the token for unknown text; None if there is none."""
        model = json.loads(self.content)["model"]
        name = model.get("unk_token")
        number: int | None = (
            model.get("unk_id") if name is None else self._tokenizer.token_to_id(name)
        )
        return number

    def encode(self, text: str) -> list[int]:
        """Return the ids of one text, without the end-of-text token."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of many texts, each 1-D and of `dtype`; the libraries use all cores.

        `tokenizers` needs 0.2 GB per MB of text, so byte-level tokenizers encode long texts in
        parts.
        """
        if self._fast is not None:
            return self._encode_fast(self._fast, texts)
        if self._places is None or all(len(text) <= _PART for text in texts):
            return self._encode(texts)
        return [self._encode_parts(text, self._places) for text in texts]

    def _encode_parts(self, text: str, places: re.Pattern[str]) -> np.ndarray:
        ids = [np.empty(0, self.dtype)]
        for part in _parts(text, places):
            ids += self._encode([part])
        return np.concatenate(ids)

    def _encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self.dtype) for encoding in encodings]

    def _encode_fast(self, fast: fastokens.Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
        ids, offsets = fast.encode_batch_flat(list(texts))
        flat = np.frombuffer(ids, np.uint32).astype(self.dtype)
        ends = np.frombuffer(offsets, np.uint64).astype(np.int64)
        return np.split(flat, ends[1:-1]) if texts else []

    @cached_property
    def _fast(self) -> fastokens.Tokenizer | None:
        """The same tokenizer in a faster library, for GPT-2's pattern and byte-level BPE; None for other tokenizers.

        `tests/corpus/test_tokenizer.py` compares the ids on random texts. Names of special tokens
        in a text are letters, as here, because this library is not told of them.
        """
        settings = json.loads(self.content)
        model = settings["model"]
        split = settings.get("pre_tokenizer") or {}
        expected = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
        is_plain = (
            all(token["special"] for token in settings["added_tokens"])
            and settings["normalizer"] is None
        )
        is_bpe = model["type"] == "BPE" and not any(model.get(key) for key in _UNUSUAL_BPE)
        if not is_plain or not is_bpe or not expected.items() <= split.items():
            return None
        plain = settings | {
            "added_tokens": [],
            "post_processor": None,
            "truncation": None,
            "padding": None,
        }
        return fastokens.Tokenizer.from_json_str(json.dumps(plain))

    @cached_property
    def _places(self) -> re.Pattern[str] | None:
        """Places over which no token continues, None if they are not known."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        if not self._splits_at_words() or any(map(_reads_white_space, added)):
            return None

        has_spaces = any(" " in token.content for token in added)
        places = _LINE_BREAK if has_spaces else _WORD_START
        # white space before a token of these is a piece of its own
        names = [re.escape(token.content) for token in added if not token.special]
        if not names:
            return places
        return re.compile(rf"{places.pattern}(?!{'|'.join(names)})")

    def _splits_at_words(self) -> bool:
        """Return True if the text is split as GPT-2 splits it, before each word."""
        split = self._tokenizer.pre_tokenizer
        is_plain = (
            isinstance(split, pre_tokenizers.ByteLevel) and self._tokenizer.normalizer is None
        )
        return is_plain and split.use_regex and not split.add_prefix_space

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a sequence of ids; special tokens are spelled out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def lost_share(self, text: str, ids: Sequence[int]) -> float:
        """Return the fraction of a text's bytes that decoding its ids does not restore.

        White space, case and compatibility forms do not count, because many tokenizers normalize
        them.
        """
        decoded = self.decode([i for i in ids if i != self.unknown])
        if decoded == text:
            return 0.0
        before = _characters(text)
        after = _characters(decoded)
        return _n_bytes(before - after) / max(1, _n_bytes(before))

    @property
    def sha256(self) -> str:
        """sha256 of the tokenizer.json, equal for tokenizers made from the same data."""
        return hashlib.sha256(self.content).hexdigest()

    @property
    def dtype(self) -> np.dtype:
        """uint16 up to 65,536 ids, uint32 above."""
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    def save(self, folder: str | Path) -> Path:
        """Write the tokenizer.json, and the end token's name if it is unusual; return the file's path."""
        path = Path(folder) / self.filename
        with atomic_path(path) as partial:
            partial.write_bytes(self.content)
        if self.eot_token != END_OF_TEXT:
            write_atomically(
                path.with_name(_END_TOKEN_FILES[0]), json.dumps({"eos_token": self.eot_token})
            )
        return path


def _reads_white_space(token: tokenizers.AddedToken) -> bool:
    """Return True if an added token takes the white space beside it, or holds a line break."""
    return token.lstrip or token.rstrip or "\n" in token.content


def _parts(text: str, places: re.Pattern[str] = _WORD_START) -> Iterator[str]:
    """Cut a text after about every `_PART` characters, where no token of a byte-level BPE can continue.

    GPT-2's pattern keeps the white space before the last character of a run together, a line break
    apart from text, and a space with the text after it.
    """
    start = 0
    while start < len(text):
        cut = places.search(text, start + _PART)
        end = len(text) if cut is None else cut.start()
        yield text[start:end]
        start = end


def bpe_size(spec: str) -> int | None:
    """Return N of 'bpe:N', None for any other specification."""
    if not spec.startswith("bpe:"):
        return None
    number = spec.removeprefix("bpe:")
    size = int(number) if number.isdecimal() else 0
    expect(
        257 <= size <= 1 << 20, "tokenizer", repr(spec), "a size from 257 (all bytes) to 1,048,576."
    )
    return size


def tokenizer_file(spec: str) -> Path | None:
    """Return the path that a specification names, None for 'bpe:N' and 'gpt2'.

    A folder, such as one that transformers wrote, stands for its tokenizer.json.
    """
    if spec == "gpt2" or bpe_size(spec) is not None:
        return None
    path = Path(spec).expanduser()
    return path / Tokenizer.filename if path.is_dir() else path


def open_tokenizer(spec: str, eot: str | None = None) -> Tokenizer:
    """Return a tokenizer without training: 'gpt2', downloaded or cached by the hub's client, or a tokenizer.json."""
    path = tokenizer_file(spec)
    if path is None:
        from huggingface_hub import hf_hub_download

        try:
            path = Path(hf_hub_download(GPT2, Tokenizer.filename))
        except Exception as error:  # errors of the hub, of httpx or of a proxy
            hint = f"without a network, set tokenizer to the path of the tokenizer.json of {GPT2}."
            raise ConfigError(
                f"tokenizer=gpt2 could not be downloaded ({type(error).__name__}); {hint}"
            ) from error
    return Tokenizer(read_file(path), f"tokenizer={spec}", eot or _named_end(path.parent))


def _named_end(folder: Path) -> str | None:
    """Return the end token that transformers' files next to a tokenizer name."""
    for name in _END_TOKEN_FILES:
        path = folder / name
        if not path.is_file():
            continue
        token = read_json(path, "repair or remove it.").get("eos_token")
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            return token
    return None


def read_file(path: Path) -> bytes:
    """Return the bytes of a tokenizer file."""
    expect(path.is_file(), "tokenizer", path, "'bpe:N', 'gpt2' or the path of an existing file.")
    return path.read_bytes()


def _characters(text: str) -> Counter[str]:
    return Counter("".join(unicodedata.normalize("NFKD", text).casefold().split()))


def _n_bytes(characters: Counter[str]) -> int:
    return sum(len(character.encode()) * number for character, number in characters.items())
