"""One piece of text on its way into a corpus, and what a source of such pieces offers."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

# One hash serves three purposes; each reads bytes of its own, so that the order of the documents says
# nothing about which of them are held out.
_SPLIT_BYTES = slice(0, 8)
_ORDER_BYTES = slice(8, 16)
_DIGEST_SIZE = 24


@dataclass(frozen=True, slots=True)
class Document:
    """One document: its text, the hash of its UTF-8 bytes, and where it was found.

    Attributes:
        text: the text, never empty
        n_bytes: length of the text in UTF-8 bytes
        digest: blake2b of those bytes, 24 bytes long
    """

    text: str
    n_bytes: int
    digest: bytes

    @classmethod
    def from_text(cls, text: str, where: str) -> "Document":
        """Hash a text; `where` names it in the error about text that is not valid Unicode."""
        try:
            raw = text.encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError(
                f"{where}: the text holds half of a surrogate pair and is no valid Unicode; "
                "repair or remove the document."
            ) from None
        return cls(text, len(raw), digest(raw))

    def held_out(self, val_fraction: float) -> bool:
        """Whether the document belongs to validation: a function of its text alone."""
        return int.from_bytes(self.digest[_SPLIT_BYTES], "big") < val_fraction * 2.0**64


def digest(raw: bytes) -> bytes:
    """The hash that identifies a document's UTF-8 bytes."""
    return hashlib.blake2b(raw, digest_size=_DIGEST_SIZE).digest()


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
        unreadable: files it left out because they are no UTF-8
    """

    read: Callable[[], Iterator[Document]]
    total_bytes: int | None = None
    licence: str | None = None
    packages: dict[str, str] = field(default_factory=dict)
    duplicates: int = 0
    unreadable: int = 0
