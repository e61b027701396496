"""The manifest of a prepared corpus: what it is, how it was made, and the hashes that identify it."""

import hashlib
import json
import math
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, TypeVar

from lightning_sv.atomic import write_atomically
from lightning_sv.errors import ConfigError, unknown

FORMAT_VERSION = 1
FILENAME = "manifest.json"
SPLITS = ("train", "val")
DTYPES = ("uint16", "uint32")
#: types of fields -> those of their values in JSON
_PLAIN: dict[Any, Any] = {
    int: int,
    float: float,
    str: str,
    str | None: (str, type(None)),
    dict[str, str]: dict,
    dict[str, Any]: dict,
    dict[str, Any] | None: (dict, type(None)),
    list[str]: list,
}
CHECKSUM = "manifest_sha256"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Shard:
    """One file of tokens: its path inside the corpus, size, hash, and how much it holds."""

    file: str
    bytes: int
    sha256: str
    documents: int
    tokens: int


@dataclass(frozen=True)
class SplitInfo:
    """One split: documents, tokens (end-of-text included), UTF-8 bytes of its text, largest id, shards.

    Of validation's text only the bytes that the tokenizer keeps count, so that bits per byte stand for them.
    """

    documents: int
    tokens: int
    bytes: int
    largest_token: int
    shards: tuple[Shard, ...]

    def sequences(self, seq_len: int) -> int:
        """Sequences of seq_len + 1 tokens it gives: the end of a shard that fills no sequence is left out."""
        return sum(shard.tokens // (seq_len + 1) for shard in self.shards)


@dataclass(frozen=True)
class Manifest:
    """What `prepare` made; the file manifest.json, whose presence says that the corpus is complete.

    Attributes:
        version: of this format
        source: the source as configured
        licence: of the text, None if unknown
        packages: versions of the packages the text was taken from (sources 'stdlib' and 'installed')
        settings: all settings that decide the content
        tokenizer: the tokenizer as configured
        tokenizer_file: its canonical file inside the corpus
        tokenizer_sha256: sha256 of that file
        vocab_size: ids lie in [0, vocab_size)
        eot: id of the token that ends every document
        dtype: 'uint16' or 'uint32'
        splits: 'train' and 'val'
        duplicates: documents dropped because another had the same text
        unreadable: source files left out because they are no UTF-8
        corpus_hash: identifies tokens and tokenizer: results of two corpora compare only if it is equal
        sources: name of each source file, package or dataset -> size, time and hash; version; or revision. None if
            an earlier version prepared the corpus
        left_out: suffix or kind -> number of files of the source that are not read
        held_out: where the first validation documents come from
        tokenizer_loss: share of the validation text's bytes that the tokenizer drops
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
    sources: dict[str, Any] | None = None
    left_out: dict[str, Any] = field(default_factory=dict)
    held_out: list[str] = field(default_factory=list)
    tokenizer_loss: float = 0.0

    @property
    def train(self) -> SplitInfo:
        """The training split."""
        return self.splits["train"]

    @property
    def val(self) -> SplitInfo:
        """The validation split."""
        return self.splits["val"]

    def to_dict(self) -> dict[str, Any]:
        """The manifest as plain JSON types, as in manifest.json, with a checksum over all of them."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain | {CHECKSUM: checksum(plain)}

    def loss_figures(self, val_loss: float) -> dict[str, Any]:
        """What a run's summary says of its final loss and of the text it is on.

        Bits per byte, nats x tokens / bytes / ln 2, do not depend on the tokenizer.

        Args:
            val_loss: nats per token of the validation split
        """
        bits = self.val.tokens / self.val.bytes / math.log(2)
        return {
            "val_loss": val_loss,
            "val_perplexity": math.exp(val_loss) if val_loss < 700 else math.inf,
            "val_bits_per_byte": val_loss * bits,
            "corpus_hash": self.corpus_hash,
            "tokenizer_sha256": self.tokenizer_sha256,
        }

    def save(self, dir: str | Path) -> None:
        """Write manifest.json in one step."""
        write_atomically(Path(dir) / FILENAME, json.dumps(self.to_dict(), indent=2, sort_keys=True))

    @classmethod
    def load(cls, dir: str | Path) -> "Manifest":
        """Read the manifest of a prepared corpus.

        Raises:
            ConfigError: there is none, it is damaged, of another format version, or names a file outside `dir`
        """
        path = Path(dir) / FILENAME
        if not path.is_file():
            raise ConfigError(f"{path} does not exist, so there is no complete corpus in {dir}; prepare it first.")
        try:
            data = json.loads(path.read_text())
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: no valid JSON ({error}); delete {dir} and prepare it again.") from None
        version = data.get("version") if isinstance(data, dict) else None
        if version != FORMAT_VERSION:
            raise ConfigError(
                f"{path}: has format version {version!r}, this code reads {FORMAT_VERSION}; "
                f"delete {dir} and prepare it again."
            )
        try:
            splits = {name: _split(data["splits"][name]) for name in SPLITS}
            manifest = _build(cls, data | {"splits": splits})
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}: is incomplete ({error!r}); delete {dir} and prepare it again.") from None
        if any(not isinstance(state, dict) for state in (manifest.sources or {}).values()):
            raise ConfigError(f"{path}: sources is damaged; delete {dir} and prepare it again.")
        if manifest.dtype not in DTYPES:
            raise ConfigError(unknown(f"{path}: dtype", manifest.dtype, DTYPES))
        for name in (manifest.tokenizer_file, *(shard.file for split in splits.values() for shard in split.shards)):
            if not _inside(name):
                raise ConfigError(f"{path}: names the file {name!r} outside {dir}; do not use this corpus.")
        if manifest.corpus_hash != corpus_hash(manifest.tokenizer_sha256, splits):
            raise ConfigError(f"{path}: its hashes do not add up to its corpus_hash; it was edited, prepare it again.")
        if data.get(CHECKSUM, checksum(data)) != checksum(data):  # manifests of earlier versions have none
            raise ConfigError(f"{path}: does not have its {CHECKSUM}; it was edited, prepare it again.")
        return manifest


def corpus_hash(tokenizer_sha256: str, splits: dict[str, SplitInfo]) -> str:
    """One hash for the tokens of all splits, their order and shards, and the tokenizer."""
    content = [tokenizer_sha256, *([name, *(s.sha256 for s in splits[name].shards)] for name in SPLITS)]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def checksum(data: dict[str, Any]) -> str:
    """Return the hash of all that a manifest says but for this hash."""
    content = {key: value for key, value in data.items() if key != CHECKSUM}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _inside(name: str) -> bool:
    """Whether a path stays in the folder it is relative to, on every system."""
    return name.isprintable() and not any(
        path.drive or path.root or ".." in path.parts for path in (PurePosixPath(name), PureWindowsPath(name))
    )


def _split(data: dict[str, Any]) -> SplitInfo:
    split = _build(SplitInfo, data | {"shards": tuple(_build(Shard, shard) for shard in data["shards"])})
    if not min(split.documents, split.tokens, split.bytes):
        raise TypeError("a split holds no documents, tokens or bytes")
    return split


def _build(cls: type[_T], data: dict[str, Any]) -> _T:
    """An instance from the keys it knows; unknown keys are ignored, fields with a default may be absent.

    Raises:
        KeyError: a key is missing
        TypeError: a value is of another type, or a number below 0 or beyond 64 bits
    """
    known = [
        each
        for each in fields(cls)  # type: ignore[arg-type]
        if each.name in data or (each.default is MISSING and each.default_factory is MISSING)
    ]
    for each in known:
        kind = _PLAIN.get(each.type)
        value = data[each.name]
        plain = kind is None or (isinstance(value, kind) and not isinstance(value, bool))
        if not plain or (kind is int and not 0 <= value < 1 << 63):
            raise TypeError(f"{each.name} is {value!r}"[:200])
    return cls(**{each.name: data[each.name] for each in known})
