"""Registry of text sources, and the split of their documents."""

from collections.abc import Iterator

from lightning_sv.corpus.config import CorpusConfig
from lightning_sv.corpus.sources.document import Document, Source
from lightning_sv.corpus.sources.files import files_source
from lightning_sv.corpus.sources.hub import hub_source
from lightning_sv.corpus.sources.stdlib import python_source
from lightning_sv.errors import ConfigError

#: For fewer documents than this, the end of each document is held out.
FEW = 16


def open_source(config: CorpusConfig) -> Source:
    """Return the documents of `config.source`.

    To add a kind of source, write a function that returns a `Source`, and add it here and in `CorpusConfig`.

    Raises:
        ConfigError: a file or dataset is missing, unreadable, or of an unknown kind; the message names it
    """
    kind = config.source.partition(":")[0]
    return {"files": files_source, "hf": hub_source}.get(kind, python_source)(config)


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
