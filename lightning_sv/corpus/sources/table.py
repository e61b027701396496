"""From the word in the config to a stream of documents."""

from collections.abc import Iterator

from lightning_sv.corpus.config import CorpusConfig
from lightning_sv.corpus.progress import Progress
from lightning_sv.corpus.sources.document import Document, Source
from lightning_sv.corpus.sources.files import files_source, source_files
from lightning_sv.corpus.sources.hub import hub_source, hub_state
from lightning_sv.corpus.sources.state import State, file_states
from lightning_sv.corpus.sources.stdlib import installed_source, package_states, stdlib_source


def open_source(config: CorpusConfig, progress: Progress) -> Source:
    """The documents that `config.source` names, without repetition and within `max_bytes`.

    To add a kind of source, write a function that returns a `Source` and give it a line here and in `CorpusConfig`.

    Raises:
        ValueError: a file or dataset is missing, unreadable, or of an unknown kind; the sentence names it
    """
    kind, _, name = config.source.partition(":")
    if kind == "stdlib":
        return stdlib_source(config.max_bytes, progress)
    if kind == "installed":
        return installed_source(config.max_bytes, progress)
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
        ValueError: as `open_source`
    """
    kind, _, name = config.source.partition(":")
    if kind == "files":
        return file_states(source_files(name, config.text_field)[0])
    if kind == "hf":
        return hub_state(name, config.hf_data_files, ask=ask_hub)
    return package_states(kind)


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
    """A pass over documents, each of training or of validation, and at least one of either.

    A document's own hash decides (`Document.held_out`), whatever the others are. Only where that leaves a split
    empty, of few documents, the one nearest in size to what the split should have changes sides; of a lone document
    the end, val_fraction of it and the rest of its first line, is validation.

    Args:
        documents: what to split; read until both splits have a document
        val_fraction: share of the documents held out

    Raises:
        ValueError: there is no document, or a lone one of a single character
    """

    def __init__(self, documents: UniqueDocuments, val_fraction: float) -> None:
        self.documents, self.val_fraction = documents, val_fraction
        #: hash of the document that changes sides
        self._changed: bytes | None = None
        #: start and end of a lone document
        self._halves: tuple[Document, Document] | None = None
        sizes: list[tuple[int, bytes]] = []
        sides = set()
        for document in documents:
            sides.add(document.held_out(val_fraction))
            if len(sides) == 2:
                return
            sizes.append((document.n_bytes, document.digest))
        if not sizes:
            limit = f" within max_bytes={documents.max_bytes}; raise it" if documents.max_bytes else "; add some"
            raise ValueError(f"there is no document{limit}.")
        if len(sizes) == 1:
            self._halves = _cut(document, val_fraction)
        else:
            share = (1 - val_fraction if True in sides else val_fraction) * sum(size for size, _ in sizes)
            self._changed = min(sizes, key=lambda each: (abs(each[0] - share), each[1]))[1]

    def __iter__(self) -> Iterator[Document]:
        return iter(self.documents if self._halves is None else self._halves)

    def held_out(self, document: Document) -> bool:
        """Whether one of these documents belongs to validation."""
        if self._halves is not None:
            return document is self._halves[1]
        return document.held_out(self.val_fraction) != (document.digest == self._changed)


def _cut(document: Document, val_fraction: float) -> tuple[Document, Document]:
    """The start of a text and its last val_fraction, from the beginning of a line where one is near."""
    text = document.text
    if len(text) < 2:
        raise ValueError("there is 1 document, of a single character; add text.")
    size = min(len(text) - 1, max(1, round(val_fraction * len(text))))
    at = len(text) - size
    at = text.rfind("\n", max(1, at - size), at) + 1 or at
    return Document.from_text(text[:at], "its start"), Document.from_text(text[at:], "its end")
