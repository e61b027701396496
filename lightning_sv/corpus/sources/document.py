"""Documents, sources of text, and the split of their documents."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from lightning_sv.errors import ConfigError

#: Maximum size of a document, because it is held in memory; split larger files into .jsonl or .parquet records.
MAX_DOCUMENT_BYTES = 1 << 30
#: U+FEFF, which some editors write at the start of a file
BYTE_ORDER_MARK = "\ufeff"
#: For fewer documents than this, the end of each document is held out.
FEW = 16


@dataclass(frozen=True, slots=True)
class Document:
    """A document: its text, which is not empty, its size and hash in UTF-8, and its file, with line or row.

    Attributes:
        digest: blake2b of those bytes, 24 bytes long; the first 8 decide its split, the next 8 its place in 'stdlib'
    """

    text: str
    n_bytes: int
    digest: bytes
    where: str = field(default="", compare=False)

    @classmethod
    def from_text(cls, text: str, where: str) -> "Document":
        """Create a document, named `where` in errors, from a text."""
        try:
            raw = text.encode("utf-8")
        except UnicodeEncodeError:
            raise ConfigError(f"{where}: the text has half of a surrogate pair; repair or remove it.") from None
        if len(raw) > MAX_DOCUMENT_BYTES:
            hint = "Split it, or write its parts as lines of a .jsonl file."
            raise ConfigError(f"{where} has {len(raw):,} bytes; expected at most {MAX_DOCUMENT_BYTES:,} bytes. {hint}")
        return cls(text, len(raw), hashlib.blake2b(raw, digest_size=24).digest(), where)

    def held_out(self, val_fraction: float) -> bool:
        """Return True if the hash of the text selects the document for validation."""
        return int.from_bytes(self.digest[:8], "big") < val_fraction * 2.0**64


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


class SplitDocuments:
    """Iterate over the documents of a source, each with True if it is in validation, any number of times.

    Exact duplicates are dropped; for them a hash of 24 bytes per document is stored, about 100 bytes in a set: ten
    million documents take 1 GB. A document's own hash decides its split (`Document.held_out`), independent of other
    documents. For fewer than `FEW` documents, or if a split would be empty, the end of each document is validation:
    val_fraction of it, plus the rest of its first line.

    Args:
        source: source to read; it is read until both splits have a document
        max_bytes: stop before the document that would exceed this many UTF-8 bytes; None for no limit
        val_fraction: fraction of the documents held out, or of each

    Attributes:
        duplicates: documents dropped in the last pass because of equal text

    Raises:
        ConfigError: there is no document, or none has more than one character
    """

    def __init__(self, source: Source, max_bytes: int | None, val_fraction: float) -> None:
        self.source, self.max_bytes, self.val_fraction = source, max_bytes, val_fraction
        self.duplicates = 0
        #: whether documents are cut, with the end of each in validation
        self._cuts = True
        longest = number = 0
        sides = set()
        for number, document in enumerate(self._unique(), 1):
            longest = max(longest, len(document.text))
            sides.add(document.held_out(val_fraction))
            if number >= FEW and len(sides) == 2:
                self._cuts = False
                return
        if not number:
            limit = f" within max_bytes={max_bytes}; raise it" if max_bytes else "; add some"
            raise ConfigError(f"there is no document{limit}.")
        if longest < 2:
            raise ConfigError("no document has more than a single character; add text.")

    def __iter__(self) -> Iterator[tuple[Document, bool]]:
        for document in self._unique():
            if self._cuts:
                yield from _cut(document, self.val_fraction)
            else:
                yield document, document.held_out(self.val_fraction)

    def _unique(self) -> Iterator[Document]:
        seen: set[bytes] = set()
        n_bytes = 0
        self.duplicates = 0
        for document in self.source.read():
            if document.digest in seen:
                self.duplicates += 1
                continue
            if self.max_bytes is not None and n_bytes + document.n_bytes > self.max_bytes:
                return
            seen.add(document.digest)
            n_bytes += document.n_bytes
            yield document


def _cut(document: Document, val_fraction: float) -> Iterator[tuple[Document, bool]]:
    """Yield the start of a text and its last val_fraction, cut at a nearby line start if there is one."""
    text, where = document.text, document.where
    size = min(len(text) - 1, max(1, round(val_fraction * len(text))))
    cut = len(text) - size
    cut = text.rfind("\n", max(1, cut - size), cut) + 1 or cut
    yield Document.from_text(text[:cut], where), False
    if size:
        yield Document.from_text(text[cut:], f"the end of {where}"), True
