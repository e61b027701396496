"""One piece of text on its way into a corpus, and what a source of such pieces offers."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from lightning_sv.errors import ConfigError

# One hash serves three purposes; each reads bytes of its own, so that the order of the documents says
# nothing about which of them are held out.
_SPLIT_BYTES = slice(0, 8)
_ORDER_BYTES = slice(8, 16)
_DIGEST_SIZE = 24
#: a document is held in memory as a unit; a larger one is a collection, and belongs into .jsonl or .parquet
MAX_DOCUMENT_BYTES = 1 << 30
#: U+FEFF, which some editors put in front of a text
BYTE_ORDER_MARK = "\ufeff"


class NotUtf8(ConfigError):
    """Bytes that are not UTF-8, where the settings demand it."""


@dataclass(frozen=True, slots=True)
class Document:
    """One document: its text, the hash of its UTF-8 bytes, and where it was found.

    Attributes:
        text: the text, never empty
        n_bytes: length of the text in UTF-8 bytes
        digest: blake2b of those bytes, 24 bytes long
        where: file, and line or row, that it comes from
        side: True or False for a part of a document that is validation or training; None where the hash decides
    """

    text: str
    n_bytes: int
    digest: bytes
    where: str = field(default="", compare=False)
    side: bool | None = field(default=None, compare=False)

    @classmethod
    def from_text(cls, text: str, where: str) -> "Document":
        """Hash a text without its byte order mark.

        Args:
            text: one document
            where: its name in errors

        Raises:
            ConfigError: the text is not valid Unicode, or is over `MAX_DOCUMENT_BYTES`
        """
        text = text.removeprefix(BYTE_ORDER_MARK)
        try:
            raw = text.encode("utf-8")
        except UnicodeEncodeError:
            raise ConfigError(
                f"{where}: the text holds half of a surrogate pair and is no valid Unicode; "
                "repair or remove the document."
            ) from None
        check_size(len(raw), where)
        return cls(text, len(raw), digest(raw), where)

    def held_out(self, val_fraction: float) -> bool:
        """Whether the document belongs to validation: a function of its text alone, or its `side`."""
        if self.side is not None:
            return self.side
        return int.from_bytes(self.digest[_SPLIT_BYTES], "big") < val_fraction * 2.0**64


def digest(raw: bytes) -> bytes:
    """The hash that identifies a document's UTF-8 bytes."""
    return hashlib.blake2b(raw, digest_size=_DIGEST_SIZE).digest()


def check_size(n_bytes: int, where: str) -> None:
    """Check that a document, or what holds it, is not over the limit.

    Raises:
        ConfigError: it is; names `where` and the limit
    """
    if n_bytes > MAX_DOCUMENT_BYTES:
        raise ConfigError(
            f"{where}: is larger than the limit of {MAX_DOCUMENT_BYTES:,} bytes per document; split it, or write its "
            "parts as lines of a .jsonl file."
        )


def order_key(document_digest: bytes) -> bytes:
    """A key that shuffles documents, the same way on every machine, independent of `held_out`."""
    return document_digest[_ORDER_BYTES]


@dataclass(frozen=True)
class Source:
    """A stream of documents that can be read again from its start.

    Attributes:
        read: starts a new pass over the documents, always in the same order
        total_bytes: bytes of text a pass gives, None where only reading would tell
        licence: licence of the text, None if unknown
        packages: versions of what the text was taken from
        duplicates: documents that the source itself already left out because another had the same text
        unreadable: files and lines it left out because they are not UTF-8; complete after the first pass
        left_out: kind of file (a suffix, links, ...) -> how many of a folder it does not read
    """

    read: Callable[[], Iterator[Document]]
    total_bytes: int | None = None
    licence: str | None = None
    packages: dict[str, str] = field(default_factory=dict)
    duplicates: int = 0
    unreadable: set[str] = field(default_factory=set)
    left_out: dict[str, int] = field(default_factory=dict)
