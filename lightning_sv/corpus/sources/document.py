"""Documents, and sources of text."""

import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_sv.errors import ConfigError

#: Maximum size of a document, because it is held in memory; split larger files into .jsonl or
#: .parquet records.
MAX_DOCUMENT_BYTES = 1 << 30
#: U+FEFF, which some editors write at the start of a file
BYTE_ORDER_MARK = "\ufeff"

#: name of a file -> its bytes, mtime_ns and sha256
FileStates = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Document:
    """A document.

    Attributes:
        text: its text, which is not empty
        n_bytes: size of the text in UTF-8
        where: its file, with line or row
        digest: blake2b of those bytes, 24 bytes long; the first 8 decide its split, the next 8 its
            place in 'stdlib'
    """

    text: str
    n_bytes: int
    digest: bytes
    where: str = field(default="", compare=False)

    @classmethod
    def from_text(cls, text: str, where: str) -> "Document":
        """Create a document, named `where` in errors, from a text."""
        raw = text.encode("utf-8")
        check_size(raw, where)
        return cls(text, len(raw), hashlib.blake2b(raw, digest_size=24).digest(), where)

    def split(self, val_fraction: float) -> str:
        """Return the split that the hash of the text selects, 'train' or 'val'."""
        is_held_out = int.from_bytes(self.digest[:8], "big") < val_fraction * 2.0**64
        return "val" if is_held_out else "train"


def check_size(raw: bytes, where: str) -> None:
    """Raise ConfigError if a document has more than `MAX_DOCUMENT_BYTES`."""
    if len(raw) > MAX_DOCUMENT_BYTES:
        found = f"{where} has more than {MAX_DOCUMENT_BYTES:,} bytes"
        raise ConfigError(f"{found}; split it, or write its parts as lines of a .jsonl file.")


def text_documents(value: Any, where: str, text_field: str) -> Iterator[Document]:
    """Yield the document of a text without its byte order mark; none if it is empty or null.

    Raises:
        ConfigError: the value is no text
    """
    if value is None:
        return
    if not isinstance(value, str):
        found = f"{where}: {text_field!r} is of type {type(value).__name__}"
        raise ConfigError(f"{found}; expected text. Change text_field.")
    text = value.removeprefix(BYTE_ORDER_MARK)
    if text:
        yield Document.from_text(text, where)


@dataclass(frozen=True)
class Slice:
    """A piece of a source that is read on its own.

    Attributes:
        name: path or address of a file
        start: first byte of its lines, or its first row group
        stop: end of those bytes or row groups, by default the end of the file
        n_bytes: bytes of text; an estimate for Parquet and compressed files
        state: hash of the file, or its revision
    """

    name: str
    start: int = 0
    stop: int = sys.maxsize
    n_bytes: int = 0
    state: str = ""


@dataclass(frozen=True)
class Source:
    """Text in slices; their documents in order are the corpus.

    Attributes:
        slices: slices in order
        licence: licence of the text, None if unknown
        packages: versions of the packages with the text, or the revision of the dataset
        left_out: suffix, or `not UTF-8` -> number of files that are not read
        files: name -> size, time and hash of each file, to notice changes
    """

    slices: Sequence[Slice]
    licence: str | None = None
    packages: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    files: FileStates = field(default_factory=dict)

    def check_unchanged(self, slices: Iterable[Slice]) -> None:
        """Check that the files of some slices have not changed, by their size and time."""
        names = {piece.name for piece in slices}
        for name in sorted(names & self.files.keys()):
            if not is_untouched(Path(name), self.files[name]):
                raise ConfigError(f"{name} has changed while it was being read; start again.")


def file_times(path: Path) -> dict[str, int]:
    """Return the size of a file and the time of its last modification."""
    status = path.stat()
    return {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns}


def is_untouched(path: Path, state: Mapping[str, Any]) -> bool:
    """Return True if a file has the size and time of a state."""
    return file_times(path).items() <= state.items()
