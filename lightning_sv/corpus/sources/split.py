"""Documents of training and of validation."""

from collections.abc import Callable, Iterator

from lightning_sv.corpus.sources.document import Document
from lightning_sv.errors import ConfigError

#: For fewer documents than this, the end of each document is held out.
FEW = 16


class SplitDocuments:
    """Iterate over documents, each with its split, 'train' or 'val', any number of times.

    Exact duplicates are dropped, by a hash per document in memory, so this is for the start of a
    large source. A document's own hash decides its split (`Document.split`), independent of other
    documents. For fewer than `FEW` documents, or if a split would be empty, the end of each
    document is validation: val_fraction of it, plus the rest of its first line.

    Args:
        read: starts a new pass over the documents; it is read until both splits have a document
        max_bytes: stop before the document that would exceed this many UTF-8 bytes; None for no
            limit
        val_fraction: fraction of the documents held out, or of each

    Attributes:
        cuts: if True, documents are cut, with the end of each in validation

    Raises:
        ConfigError: there is no document, or none has more than one character
    """

    def __init__(
        self, read: Callable[[], Iterator[Document]], max_bytes: int | None, val_fraction: float
    ) -> None:
        self.read = read
        self.max_bytes = max_bytes
        self.val_fraction = val_fraction
        self.cuts = self._needs_cuts()

    def _needs_cuts(self) -> bool:
        """Return True for few documents, or an empty split; read no further than needed."""
        longest = 0
        splits = set()
        for number, document in enumerate(self._unique(), 1):
            longest = max(longest, len(document.text))
            splits.add(document.split(self.val_fraction))
            if number >= FEW and len(splits) == 2:
                return False

        if longest == 0:
            limit = "" if self.max_bytes is None else f", or raise max_bytes={self.max_bytes}"
            raise ConfigError(f"there is no document; add some{limit}.")
        if longest == 1:
            raise ConfigError("no document has more than a single character; add text.")
        return True

    def __iter__(self) -> Iterator[tuple[Document, str]]:
        for document in self._unique():
            yield from split_document(document, self.val_fraction, cuts=self.cuts)

    def _unique(self) -> Iterator[Document]:
        seen: set[bytes] = set()
        n_bytes = 0
        for document in self.read():
            if document.digest in seen:
                continue
            n_bytes += document.n_bytes
            if self.max_bytes is not None and n_bytes > self.max_bytes:
                return
            seen.add(document.digest)
            yield document


def split_document(
    document: Document, val_fraction: float, *, cuts: bool
) -> Iterator[tuple[Document, str]]:
    """Yield a document with its split; with `cuts` its start and its end.

    The end is the last val_fraction of the text, cut at a line start if one is near.
    """
    if not cuts:
        yield document, document.split(val_fraction)
        return
    text = document.text
    where = document.where
    size = max(1, round(val_fraction * len(text)))
    size = min(size, len(text) - 1)
    cut = len(text) - size
    line_end = text.rfind("\n", max(1, cut - size), cut)
    if line_end >= 0:
        cut = line_end + 1
    yield Document.from_text(text[:cut], where), "train"
    if size:
        yield Document.from_text(text[cut:], f"the end of {where}"), "val"
