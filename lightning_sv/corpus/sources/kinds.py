"""Kinds of sources by the first word of `data.corpus.source`; `CorpusConfig` checks the word."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from lightning_sv.corpus.config import CorpusConfig
from lightning_sv.corpus.sources.document import Document, Slice, Source
from lightning_sv.corpus.sources.files import files_source
from lightning_sv.corpus.sources.formats import read_file
from lightning_sv.corpus.sources.hub import hub_source, read_dataset
from lightning_sv.corpus.sources.stdlib import python_source, read_python


class Kind(NamedTuple):
    """A kind of source.

    Attributes:
        open: returns the source of a config, in slices of at most about the bytes of a part
        read: yields the documents of a slice, always in the same order
    """

    open: Callable[[CorpusConfig, int], Source]
    read: Callable[[Slice, CorpusConfig], Iterator[Document]]


SOURCES = {
    "stdlib": Kind(python_source, read_python),
    "installed": Kind(python_source, read_python),
    "files": Kind(files_source, read_file),
    "hf": Kind(hub_source, read_dataset),
}


def read_slices(slices: Iterable[Slice], config: CorpusConfig) -> Iterator[Document]:
    """Yield the documents of slices, in their order."""
    read = SOURCES[config.kind].read
    for piece in slices:
        yield from read(piece, config)
