"""Documents of training and of validation.

A document's own hash decides its split (`Document.split`), independent of other documents. For
fewer than `FEW` documents, or if a split would be empty, the end of each document is validation:
val_fraction of it, plus the rest of its first line.
"""

from collections.abc import Iterable, Iterator

from lightning_sv.corpus.sources.document import Document
from lightning_sv.errors import ConfigError

#: For fewer documents than this, the end of each document is held out.
FEW = 16


def unique(documents: Iterable[Document], max_bytes: float) -> Iterator[Document]:
    """Yield documents without exact duplicates, up to the one that would exceed `max_bytes`.

    A hash per document is in memory, so this is for the start of a large source.
    """
    seen: set[bytes] = set()
    n_bytes = 0
    for document in documents:
        if document.digest in seen:
            continue
        n_bytes += document.n_bytes
        if n_bytes > max_bytes:
            return
        seen.add(document.digest)
        yield document


def needs_cuts(documents: Iterable[Document], val_fraction: float) -> bool:
    """Return True for few documents, or an empty split; read no further than needed.

    Raises:
        ConfigError: there is no document, or none has more than one character
    """
    longest = 0
    splits = set()
    for number, document in enumerate(documents, 1):
        longest = max(longest, len(document.text))
        splits.add(document.split(val_fraction))
        if number >= FEW and len(splits) == 2:
            return False

    if longest < 2:
        found = "there is no document of two characters"
        raise ConfigError(f"{found}; add text, or raise max_bytes.")
    return True


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
