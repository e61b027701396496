"""Documents and sources of text."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from lightning_sv.errors import ConfigError

#: Maximum size of a document, because it is held in memory; split larger files into .jsonl or .parquet records.
MAX_DOCUMENT_BYTES = 1 << 30
#: U+FEFF, which some editors write at the start of a file
BYTE_ORDER_MARK = "\ufeff"


@dataclass(frozen=True, slots=True)
class Document:
    """A document: its text, the hash of its UTF-8 bytes, and its location.

    Attributes:
        text: the text, never empty
        n_bytes: length of the text in UTF-8 bytes
        digest: blake2b of those bytes, 24 bytes long; the first 8 decide its split, the next 8 its place in 'stdlib'
        where: its file, with line or row
    """

    text: str
    n_bytes: int
    digest: bytes
    where: str = field(default="", compare=False)

    @classmethod
    def from_text(cls, text: str, where: str) -> "Document":
        """Create a document, named `where` in errors, from a text without its byte order mark."""
        text = text.removeprefix(BYTE_ORDER_MARK)
        try:
            raw = text.encode("utf-8")
        except UnicodeEncodeError:
            raise ConfigError(
                f"{where}: the text has half of a surrogate pair, which is not valid Unicode; "
                "repair or remove the document."
            ) from None
        check_size(len(raw), where)
        return cls(text, len(raw), hashlib.blake2b(raw, digest_size=24).digest(), where)

    def held_out(self, val_fraction: float) -> bool:
        """Return True if the hash of the text selects the document for validation."""
        return int.from_bytes(self.digest[:8], "big") < val_fraction * 2.0**64


def check_size(n_bytes: int, where: str) -> None:
    """Check that a document or its record, named `where` in errors, is within the size limit."""
    if n_bytes > MAX_DOCUMENT_BYTES:
        raise ConfigError(
            f"{where} is larger than the limit of {MAX_DOCUMENT_BYTES:,} bytes per document; split it, or write its "
            "parts as lines of a .jsonl file."
        )


@dataclass(frozen=True)
class Source:
    """A stream of documents that can be restarted.

    Attributes:
        read: starts a new pass over the documents, always in the same order
        total_bytes: bytes of text per pass, None if unknown
        licence: licence of the text, None if unknown
        packages: versions of the packages with the text, or the revision of the dataset
        unreadable: files and lines omitted because they are not UTF-8; complete after the first pass
        left_out: suffix -> number of files in folders that are not read
    """

    read: Callable[[], Iterator[Document]]
    total_bytes: int | None = None
    licence: str | None = None
    packages: dict[str, str] = field(default_factory=dict)
    unreadable: set[str] = field(default_factory=set)
    left_out: dict[str, int] = field(default_factory=dict)
