"""From the word in the config to a stream of documents."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_sv.corpus.config import CorpusConfig
from lightning_sv.corpus.document import Document, Source
from lightning_sv.corpus.files import files_source
from lightning_sv.corpus.hub import hub_source
from lightning_sv.corpus.progress import Progress
from lightning_sv.corpus.stdlib import installed_source, stdlib_source


def open_source(config: CorpusConfig, progress: Progress) -> Source:
    """The documents that `config.source` names, without repetition and within `max_bytes`.

    To add a kind of source, write a function that returns a `Source` and give it a line here and in `CorpusConfig`.

    Raises:
        ValueError: A file or dataset is missing, unreadable, or of an unknown kind; the sentence names it.
    """
    kind, _, name = config.source.partition(":")
    if kind == "stdlib":
        return stdlib_source(config.max_bytes, progress)
    if kind == "installed":
        return installed_source(config.max_bytes, progress)
    if kind == "files":
        return files_source(name, text_field=config.text_field)
    assert kind == "hf", kind  # CorpusConfig accepts no other
    return hub_source(
        name,
        subset=config.hf_subset,
        split=config.hf_split,
        data_files=config.hf_data_files,
        text_field=config.text_field,
    )


class UniqueDocuments:
    """A pass over a source that drops exact repetitions and stops at a number of bytes.

    Keeps 24 bytes of hash a document, about 100 with the set's own needs: ten million documents take 1 GB.

    Args:
        source: What to read.
        max_bytes: Stop before the document that would exceed this many UTF-8 bytes; None reads to the end.

    Attributes:
        duplicates: Documents dropped so far because an earlier one had the same text.
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
