"""From the word in the config to a stream of documents."""

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

#: of fewer documents than this none is held out, but the end of each
FEW = 16


def open_source(config: CorpusConfig, shown: bool = True) -> Source:
    """The documents that `config.source` names, without repetition and within `max_bytes`.

    To add a kind of source, write a function that returns a `Source` and give it a line here, in `source_state` and in
    `CorpusConfig`.

    Args:
        config: names the source
        shown: if True, show how far a search of the environment has come

    Raises:
        ConfigError: a file or dataset is missing, unreadable, or of an unknown kind; the sentence names it
    """
    kind, _, name = config.source.partition(":")
    if kind in ("stdlib", "installed"):
        return python_source(kind, config.max_bytes, shown)
    if kind == "files":
        return files_source(name, text_field=config.text_field, errors=config.errors)
    assert kind == "hf", kind  # CorpusConfig accepts no other
    return hub_source(
        name,
        subset=config.hf_subset,
        split=config.hf_split,
        data_files=config.hf_data_files,
        text_field=config.text_field,
    )


def source_state(config: CorpusConfig, *, ask_hub: bool) -> State:
    """Return what identifies the text that `config.source` names now, without reading it.

    Args:
        config: names the source
        ask_hub: if True, ask the Hugging Face hub for a dataset's revision

    Raises:
        ConfigError: as `open_source`
    """
    kind, _, name = config.source.partition(":")
    if kind == "files":
        return file_states(source_files(name, config.text_field)[0])
    if kind == "hf":
        return hub_state(name, config.hf_data_files, ask=ask_hub)
    return package_states(kind)


def changed_text(manifest: Manifest, *, ask_hub: bool = False) -> list[str]:
    """Return a phrase per file, package or dataset that differs from what was prepared.

    Nothing differs if an earlier version prepared the corpus, or if none of its text exists here any more.

    Args:
        manifest: of the prepared corpus
        ask_hub: if True, ask the Hugging Face hub for a dataset's revision
    """
    if manifest.sources is None:
        return []
    try:
        now = source_state(CorpusConfig(**manifest.settings), ask_hub=ask_hub)
    except (TypeError, ValueError, OSError):  # some of it is gone, or the hub does not answer
        now = file_states(path for path in map(Path, manifest.sources) if path.is_file())
    return differences(manifest.sources, now) if now else []


def listed(phrases: list[str]) -> str:
    """Return the first three phrases as one, with the number of the others."""
    more = f", and {len(phrases) - 3:,} more" if len(phrases) > 3 else ""
    return ", ".join(phrases[:3]) + more


class UniqueDocuments:
    """A pass over a source that drops exact repetitions and stops at a number of bytes.

    Keeps 24 bytes of hash a document, about 100 with the set's own needs: ten million documents take 1 GB.

    Args:
        source: what to read
        max_bytes: stop before the document that would exceed this many UTF-8 bytes; None reads to the end

    Attributes:
        duplicates: documents dropped so far because an earlier one had the same text
    """

    def __init__(self, source: Source, max_bytes: int | None) -> None:
        self.source = source
        self.max_bytes = max_bytes
        self.duplicates = source.duplicates

    def __iter__(self) -> Iterator[Document]:
        seen: set[bytes] = set()
        taken = 0
        self.duplicates = self.source.duplicates
        for document in self.source.read():
            if document.digest in seen:
                self.duplicates += 1
                continue
            if self.max_bytes is not None and taken + document.n_bytes > self.max_bytes:
                return
            seen.add(document.digest)
            taken += document.n_bytes
            yield document


class SplitDocuments:
    """A pass over documents, each of training or of validation.

    A document's own hash decides (`Document.held_out`), whatever the others are. Of fewer than `FEW` documents, or
    where the hashes leave a split empty, the end of each is validation: val_fraction of it, and the rest of its first
    line.

    Args:
        documents: what to split; read until both splits have a document
        val_fraction: share of the documents held out, or of each

    Raises:
        ConfigError: there is no document, or none of more than a character
    """

    def __init__(self, documents: UniqueDocuments, val_fraction: float) -> None:
        self.documents, self.val_fraction = documents, val_fraction
        #: whether the end of each document is validation
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
        """Whether one of these documents belongs to validation."""
        return document.held_out(self.val_fraction)


def _cut(document: Document, val_fraction: float) -> Iterator[Document]:
    """Yield the start of a text and its last val_fraction, from the beginning of a line where one is near."""
    text, where = document.text, document.where
    size = min(len(text) - 1, max(1, round(val_fraction * len(text))))
    at = len(text) - size
    at = text.rfind("\n", max(1, at - size), at) + 1 or at
    yield replace(Document.from_text(text[:at], where), side=False)
    if size:
        yield replace(Document.from_text(text[at:], f"the end of {where}"), side=True)
