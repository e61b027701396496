"""Registry of text sources."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from lightning_sv.corpus.config import CorpusConfig
from lightning_sv.corpus.manifest import Manifest
from lightning_sv.corpus.sources.document import Document, Source
from lightning_sv.corpus.sources.files import files_source, source_files
from lightning_sv.corpus.sources.hub import hub_source, hub_state
from lightning_sv.corpus.sources.state import State, differences, file_states
from lightning_sv.corpus.sources.stdlib import package_states, python_source
from lightning_sv.errors import ConfigError

#: For fewer documents than this, the end of each document is held out.
FEW = 16


def open_source(config: CorpusConfig, shown: bool = True) -> Source:
    """Return the documents of `config.source`, without duplicates and within `max_bytes`.

    To add a kind of source, write a function that returns a `Source`, and add it here, in `source_state` and in
    `CorpusConfig`.

    Args:
        config: settings of the corpus
        shown: if True, show the progress of a search of the environment

    Raises:
        ConfigError: a file or dataset is missing, unreadable, or of an unknown kind; the message names it
    """
    kind = config.source.partition(":")[0]
    if kind == "files":
        return files_source(config)
    if kind == "hf":
        return hub_source(config)
    return python_source(config.source, config.max_bytes, shown)


def source_state(config: CorpusConfig, *, ask_hub: bool) -> State:
    """Return the identity of the current text of `config.source`, without reading it; see `changed_text`."""
    kind = config.source.partition(":")[0]
    if kind == "files":
        return file_states(source_files(config)[0])
    if kind == "hf":
        return hub_state(config, ask=ask_hub)
    return package_states(config.source)


def changed_text(manifest: Manifest, *, ask_hub: bool = False) -> list[str]:
    """Return a phrase per file, package or dataset that has changed since the preparation.

    The list is empty if an older version prepared the corpus, or if none of its text exists here any more.

    Args:
        manifest: manifest of the prepared corpus
        ask_hub: if True, ask the Hugging Face hub for a dataset's revision
    """
    if manifest.sources is None:
        return []
    try:
        now = source_state(CorpusConfig(**manifest.settings), ask_hub=ask_hub)
    except (TypeError, ValueError, OSError):  # some text no longer exists, or the hub does not answer
        now = file_states(path for path in map(Path, manifest.sources) if path.is_file())
    return differences(manifest.sources, now) if now else []


def listed(phrases: list[str]) -> str:
    """Return the first three phrases as one, with the number of the others."""
    more = f", and {len(phrases) - 3:,} more" if len(phrases) > 3 else ""
    return ", ".join(phrases[:3]) + more


class UniqueDocuments:
    """Iterate over a source without exact duplicates, up to a number of bytes.

    Stores a hash of 24 bytes per document, about 100 bytes in a set: ten million documents take 1 GB.

    Args:
        source: source to read
        max_bytes: stop before the document that would exceed this many UTF-8 bytes; None for no limit

    Attributes:
        duplicates: documents dropped so far because of equal text
    """

    def __init__(self, source: Source, max_bytes: int | None) -> None:
        self.source = source
        self.max_bytes = max_bytes
        self.duplicates = source.duplicates

    def __iter__(self) -> Iterator[Document]:
        seen: set[bytes] = set()
        n_bytes = 0
        self.duplicates = self.source.duplicates
        for document in self.source.read():
            if document.digest in seen:
                self.duplicates += 1
                continue
            if self.max_bytes is not None and n_bytes + document.n_bytes > self.max_bytes:
                return
            seen.add(document.digest)
            n_bytes += document.n_bytes
            yield document


class SplitDocuments:
    """Iterate over documents, each assigned to training or validation.

    A document's own hash decides (`Document.held_out`), independent of other documents. For fewer than `FEW` documents,
    or if a split would be empty, the end of each document is validation: val_fraction of it, plus the rest of its first
    line.

    Args:
        documents: documents to split; read until both splits have a document
        val_fraction: fraction of the documents held out, or of each

    Raises:
        ConfigError: there is no document, or none has more than one character
    """

    def __init__(self, documents: UniqueDocuments, val_fraction: float) -> None:
        self.documents, self.val_fraction = documents, val_fraction
        #: whether documents are cut, with the end of each in validation
        self._cuts = True
        longest = number = 0
        sides = set()
        for document in documents:
            number += 1
            longest = max(longest, len(document.text))
            sides.add(document.held_out(val_fraction))
            if number >= FEW and len(sides) == 2:
                self._cuts = False
                return
        if not number:
            limit = f" within max_bytes={documents.max_bytes}; raise it" if documents.max_bytes else "; add some"
            raise ConfigError(f"there is no document{limit}.")
        if longest < 2:
            raise ConfigError("no document has more than a single character; add text.")

    def __iter__(self) -> Iterator[Document]:
        for document in self.documents:
            yield from _cut(document, self.val_fraction) if self._cuts else (document,)

    def held_out(self, document: Document) -> bool:
        """Return True if one of these documents is in validation."""
        return document.held_out(self.val_fraction)


def _cut(document: Document, val_fraction: float) -> Iterator[Document]:
    """Yield the start of a text and its last val_fraction, cut at a nearby line start if there is one."""
    text, where = document.text, document.where
    size = min(len(text) - 1, max(1, round(val_fraction * len(text))))
    cut = len(text) - size
    cut = text.rfind("\n", max(1, cut - size), cut) + 1 or cut
    yield replace(Document.from_text(text[:cut], where), side=False)
    if size:
        yield replace(Document.from_text(text[cut:], f"the end of {where}"), side=True)
