"""Manifest of a prepared corpus: settings, provenance and hashes."""

import hashlib
import json
import math
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from lightning_sv.atomic import read_json
from lightning_sv.errors import ConfigError, expect

FORMAT_VERSION = 1
FILENAME = "manifest.json"
SPLITS = ("train", "val")
#: key of the checksum in manifest.json, and field of `Manifest`
CHECKSUM = "manifest_sha256"
#: path of a file inside its folder, on every operating system
_PLAIN_NAME = re.compile(r"(\w[\w.-]*/)*\w[\w.-]*")
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
    """One split.

    Attributes:
        documents: number of documents
        tokens: number of tokens, with end-of-text tokens
        bytes: UTF-8 bytes of the text
        shards: files of the split, in order
    """

    documents: int
    tokens: int
    bytes: int
    shards: tuple[Shard, ...]

    def sequences(self, seq_len: int) -> int:
        """Return the number of sequences of seq_len + 1 tokens; the rest of a shard is unused."""
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
        corpus_hash: hash of tokens and tokenizer; results are comparable only if it is equal
        sources: name of each source file -> size, time and hash
        left_out: suffix, or `not UTF-8` -> number of files of the source that are not read
        manifest_sha256: checksum of manifest.json, with keys that only other versions know; empty
            before it is written
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
    corpus_hash: str
    sources: dict[str, Any]
    left_out: dict[str, Any]
    manifest_sha256: str = ""

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
        return [*self.train.shards, *self.val.shards]

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
        again = f"delete {dir} and prepare it again."
        data = read_json(path, again)
        version = data.get("version")
        expected = f"{FORMAT_VERSION}. Delete {dir} and prepare it again."
        expect(version == FORMAT_VERSION, f"{path}: version", repr(version), expected)
        if data.get(CHECKSUM) != checksum(data):
            found = f"{path} does not match its {CHECKSUM}, so it was edited"
            raise ConfigError(f"{found}; prepare the corpus again.")
        try:
            splits = {name: _split(data["splits"][name]) for name in SPLITS}
            manifest = _build(cls, data | {"splits": splits})
        except KeyError as error:
            raise ConfigError(f"{path} is incomplete ({error!r}); {again}") from None
        _check_files(manifest, path)
        return manifest


def _check_files(manifest: Manifest, path: Path) -> None:
    """Check that the files of a corpus are inside its folder."""
    names = [manifest.tokenizer_file]
    names += [shard.file for shard in manifest.shards]
    for name in names:
        if not _PLAIN_NAME.fullmatch(name):
            found = f"{path} names the file {name!r}, outside its folder or of an unusual name"
            raise ConfigError(f"{found}; do not use this corpus.")


def corpus_hash(tokenizer_sha256: str, splits: dict[str, SplitInfo]) -> str:
    """Return the hash of the tokens of all splits, their order and shards, and the tokenizer."""
    content: list[Any] = [tokenizer_sha256]
    for name in SPLITS:
        digests = [shard.sha256 for shard in splits[name].shards]
        content.append([name, *digests])
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def checksum(data: dict[str, Any]) -> str:
    """Return the hash of a manifest without its checksum."""
    content = {key: value for key, value in data.items() if key != CHECKSUM}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _split(data: dict[str, Any]) -> SplitInfo:
    shards = tuple(_build(Shard, shard) for shard in data["shards"])
    return _build(SplitInfo, data | {"shards": shards})


def _build(cls: type[_T], data: dict[str, Any]) -> _T:
    """Return an instance of a dataclass, ignoring unknown keys; KeyError if a value is missing."""
    return cls(**{entry.name: data[entry.name] for entry in fields(cls)})  # type: ignore[arg-type]
