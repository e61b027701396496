"""Kinds of sources by the first word of `data.corpus.source`; `CorpusConfig` checks the word."""

from collections.abc import Callable

from lightning_sv.corpus.config import CorpusConfig
from lightning_sv.corpus.sources.document import Reader, Source
from lightning_sv.corpus.sources.files import files_source
from lightning_sv.corpus.sources.formats import FileReader
from lightning_sv.corpus.sources.hub import HubReader, hub_source
from lightning_sv.corpus.sources.stdlib import PythonReader, python_source

#: kind -> function of the config, the source of an earlier start or None, and the size of a part
SOURCES: dict[str, Callable[[CorpusConfig, Source | None, int], Source]] = {
    "stdlib": python_source, "installed": python_source, "files": files_source, "hf": hub_source,
}  # fmt: skip
READERS: dict[str, Callable[[CorpusConfig], Reader]] = {
    "stdlib": PythonReader, "installed": PythonReader, "files": FileReader, "hf": HubReader,
}  # fmt: skip
