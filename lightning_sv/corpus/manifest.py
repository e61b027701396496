"""Manifest of a prepared corpus: settings, provenance and hashes."""

import hashlib
import json
import math
from dataclasses import asdict, dataclass, fields
from itertools import chain
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin

from lightning_sv.atomic import read_json
from lightning_sv.errors import ConfigError, expect

FORMAT_VERSION = 1
FILENAME = "manifest.json"
SPLITS = ("train", "val")
CHECKSUM = "manifest_sha256"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Shard:
    """A token file: path relative to the corpus, size, hash, and contents."""

    file: str
    bytes: int
    sha256: str
    documents: int
    tokens: int


@dataclass(frozen=True)
class SplitInfo:
    """One split: documents, tokens (including end-of-text), UTF-8 bytes of its text, largest id, shards.

    Validation bytes count only text that the tokenizer preserves, so that bits per byte refer to
    it.
    """

    documents: int
    tokens: int
    bytes: int
    largest_token: int
    shards: tuple[Shard, ...]

    def sequences(self, seq_len: int) -> int:
        """Return the number of sequences of seq_len + 1 tokens; the remainder of each shard is unused."""
        return sum(shard.tokens // (seq_len + 1) for shard in self.shards)


@dataclass(frozen=True)
class Manifest:
    """Result of `prepare`, stored as manifest.json, which exists only in complete corpora.

    Attributes:
        licence: licence of the text, None if unknown
        packages: versions of the packages with the text, or the revision of the dataset
        settings: all settings that determine the content
        tokenizer_file: canonical tokenizer file inside the corpus
        vocab_size: upper bound of the ids, which are in [0, vocab_size)
        eot: id of the end-of-text token
        duplicates: number of documents dropped because of equal text
        unreadable: number of source files omitted because they are not UTF-8
        corpus_hash: hash of tokens and tokenizer; results are comparable only if it is equal
        sources: name of each source file -> size, time and hash
        left_out: suffix -> number of files of the source that are not read
        held_out: sources of the first validation documents
        tokenizer_loss: fraction of the validation text's bytes that the tokenizer drops
    """

    version: int
    source: str
    licence: str | None
    packages: dict[str, str]
    settings: dict[str, Any]
    tokenizer: str
    tokenizer_file: str
    tokenizer_sha256: str
    vocab_size: int
    eot: int
    dtype: str
    splits: dict[str, SplitInfo]
    duplicates: int
    unreadable: int
    corpus_hash: str
    sources: dict[str, Any]
    left_out: dict[str, Any]
    held_out: list[str]
    tokenizer_loss: float

    @property
    def train(self) -> SplitInfo:
        """Training split."""
        return self.splits["train"]

    @property
    def val(self) -> SplitInfo:
        """Validation split."""
        return self.splits["val"]

    @property
    def shards(self) -> list[Shard]:
        """Shards of both splits."""
        return list(chain.from_iterable(self.splits[name].shards for name in SPLITS))

    def to_dict(self) -> dict[str, Any]:
        """Return the manifest as plain JSON types with a checksum, as in manifest.json."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain | {CHECKSUM: checksum(plain)}

    def loss_metrics(self, val_loss: float) -> dict[str, Any]:
        """Return the final loss, in nats per token, and the corpus identity for a run's summary.

        Bits per byte, nats x tokens / bytes / ln 2, do not depend on the tokenizer.
        """
        bits = self.val.tokens / self.val.bytes / math.log(2)
        return {
            "val_loss": val_loss,
            "val_perplexity": math.exp(val_loss) if val_loss < 700 else math.inf,
            "val_bits_per_byte": val_loss * bits,
            "corpus_hash": self.corpus_hash,
            "tokenizer_sha256": self.tokenizer_sha256,
        }

    @classmethod
    def load(cls, dir: str | Path) -> "Manifest":
        """Read the manifest of a prepared corpus.

        Raises:
            ConfigError: the manifest is missing, damaged, has a different format version, or names
                a file outside `dir`
        """
        path = Path(dir) / FILENAME
        if not path.is_file():
            hint = "Run `lightning-sv prepare` or `make data`, or correct data.corpus.dir."
            raise ConfigError(f"{path} does not exist; expected a complete corpus in {dir}. {hint}")
        data = read_json(path, f"delete {dir} and prepare it again.")
        version = data.get("version")
        again = f"{FORMAT_VERSION}. Delete {dir} and prepare it again."
        expect(version == FORMAT_VERSION, f"{path}: version", repr(version), again)
        try:
            splits = {name: _split(data["splits"][name]) for name in SPLITS}
            manifest = _build(cls, data | {"splits": splits})
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path} is incomplete ({error!r}); delete {dir} and prepare it again."
            ) from None
        if any(not isinstance(state, dict) for state in manifest.sources.values()):
            raise ConfigError(f"{path}: sources is damaged; delete {dir} and prepare it again.")
        for name in (manifest.tokenizer_file, *(shard.file for shard in manifest.shards)):
            if not _inside(name):
                raise ConfigError(
                    f"{path} names the file {name!r} outside {dir}; do not use this corpus."
                )
        if data.get(CHECKSUM) != checksum(data):
            raise ConfigError(
                f"{path} does not match its {CHECKSUM}, so it was edited; prepare the corpus again."
            )
        return manifest


def corpus_hash(tokenizer_sha256: str, splits: dict[str, SplitInfo]) -> str:
    """Return the hash of the tokens of all splits, their order and shards, and the tokenizer."""
    content = [
        tokenizer_sha256,
        *([name, *(s.sha256 for s in splits[name].shards)] for name in SPLITS),
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def checksum(data: dict[str, Any]) -> str:
    """Return the hash of a manifest without its checksum."""
    content = {key: value for key, value in data.items() if key != CHECKSUM}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _inside(name: str) -> bool:
    """Return True if a path stays inside its folder, on every operating system."""
    return name.isprintable() and not any(
        path.drive or path.root or ".." in path.parts
        for path in (PurePosixPath(name), PureWindowsPath(name))
    )


def _split(data: dict[str, Any]) -> SplitInfo:
    split = _build(
        SplitInfo, data | {"shards": tuple(_build(Shard, shard) for shard in data["shards"])}
    )
    if not min(split.documents, split.tokens, split.bytes):
        raise TypeError("a split has no documents, tokens or bytes")
    return split


def _build(cls: type[_T], data: dict[str, Any]) -> _T:
    """Return an instance, ignoring unknown keys; raise KeyError or TypeError for a missing or a wrong value."""
    known = fields(cls)  # type: ignore[arg-type]
    for entry in known:
        kinds = get_args(entry.type) if isinstance(entry.type, UnionType) else (entry.type,)
        value = data[entry.name]
        valid = isinstance(
            value, tuple(get_origin(kind) or kind for kind in kinds)
        ) and not isinstance(value, bool)
        if not valid or (entry.type is int and not 0 <= value < 1 << 63):
            raise TypeError(f"{entry.name} is {value!r}"[:200])
    return cls(**{entry.name: data[entry.name] for entry in known})
