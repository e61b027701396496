"""Documents from a Hugging Face dataset: row groups of its Parquet files, or its rows streamed.

The client of the hub repeats a request after a time-out, a lost connection or an answer 408, 429 or
5xx up to five times, after 1, 2, 4, 8 and 8 seconds. After that the preparation ends, and the next
start goes on.
"""

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from lightning_sv.corpus.config import CorpusConfig
from lightning_sv.corpus.sources.document import (
    Document,
    Slice,
    Source,
    record_text,
    text_documents,
)
from lightning_sv.corpus.sources.packages import needs
from lightning_sv.corpus.sources.parquet import read_parquet, row_groups
from lightning_sv.errors import ConfigError, expect

log = logging.getLogger(__name__)

#: timeout in seconds of the hub's first answer; `datasets` would retry silently for half a minute
WAIT_S = 10.0
#: threads that read the ends of Parquet files, where their row groups are listed
_THREADS = 16
_HINT = (
    "Check the name, hf_subset, hf_split, HF_TOKEN, the network and its proxy (HTTPS_PROXY); "
    "without a network use files:PATH. The next start goes on where this one ended."
)


def hub_source(config: CorpusConfig, previous: Source, part_bytes: int) -> Source:
    """Return the documents of a dataset of the Hugging Face hub, in the dataset's order.

    A preparation goes on with the revision of its `previous` start, without asking for a newer one.
    """
    needs("datasets", config.source)
    name = config.location
    expected = f"a dataset of the hub. Read a folder by files:{name}."
    expect(not Path(name).exists(), "source", config.source, expected)
    revision = previous.packages.get(config.source)
    if revision is not None:
        log.info("going on with revision %s of %s", revision, config.source)
    if previous.slices:
        return previous

    revision = _hub_revision(config)
    packages = {config.source: revision} if revision else {}
    with _naming(config, _subset(config)):
        files = _data_files(config, name, revision)
        slices = _slices(config, name, files, revision, part_bytes)
    return Source(slices, packages=packages)


@contextmanager
def _naming(config: CorpusConfig, where: str) -> Iterator[None]:
    """Name the dataset and a place in every error of a reader, which can raise anything."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise _unreadable(config, where, error) from error


def _slices(
    config: CorpusConfig, name: str, files: list[str], revision: str | None, part_bytes: int
) -> list[Slice]:
    """Return the row groups of all files; a single slice if a file is not Parquet."""
    state = revision or ""
    is_parquet = all(file.endswith(".parquet") for file in files)
    if not is_parquet:
        return [Slice(name, state=state)]

    def groups_of(file: str) -> list[Slice]:
        with _open(file) as content:
            return row_groups(file, state, content, config.text_field, part_bytes)

    log.info("reading the row groups of %s files of %s", f"{len(files):,}", config.source)
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(chain.from_iterable(pool.map(groups_of, files)))


def _data_files(config: CorpusConfig, name: str, revision: str | None) -> list[str]:
    """Return the addresses of the files of a subset and split, in order."""
    datasets = needs("datasets", config.source)
    builder = datasets.load_dataset_builder(name, config.hf_subset, revision=revision)
    files = builder.config.data_files or {}
    if config.hf_split not in files:
        expected = f"one of {sorted(files)}, the splits of {name}."
        raise ConfigError(f"hf_split is {config.hf_split}; expected {expected}")
    return list(files[config.hf_split])


def _open(file: str) -> Any:
    import fsspec

    return fsspec.open(file, "rb")


def read_dataset(piece: Slice, config: CorpusConfig) -> Iterator[Document]:
    """Yield one document per row of a slice."""
    if piece.stop is None:
        with _naming(config, _subset(config)):
            yield from _streamed_rows(piece, config)
    else:
        with _naming(config, piece.name), _open(piece.name) as file:
            yield from read_parquet(file, piece, config.text_field)


def _streamed_rows(piece: Slice, config: CorpusConfig) -> Iterator[Document]:
    datasets = needs("datasets", config.source)
    rows = datasets.load_dataset(
        piece.name,
        config.hf_subset,
        split=config.hf_split,
        streaming=True,
        revision=piece.state or None,
    )
    for row, record in enumerate(rows, 1):
        where = f"{config.source}, row {row}"
        text = record_text(record, where, config.text_field)
        yield from text_documents(text, where, config.text_field)


def _subset(config: CorpusConfig) -> str:
    return f"subset {config.hf_subset!r}, split {config.hf_split!r}"


def _hub_revision(config: CorpusConfig) -> str | None:
    """Return a dataset's revision on the hub, with a log message and a timeout; None if offline."""
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:  # `datasets` uses its cache, or fails at once
        return None
    log.info("asking %s for %s, %g s at most", constants.ENDPOINT, config.location, WAIT_S)
    try:
        return HfApi(endpoint=constants.ENDPOINT).dataset_info(config.location, timeout=WAIT_S).sha
    except Exception as error:  # errors of the hub, of httpx or of a proxy
        raise _unreadable(config, f"on {constants.ENDPOINT}", error) from error


def _unreadable(config: CorpusConfig, where: str, error: Exception) -> ConfigError:
    message = str(error).strip() or type(error).__name__
    reason = message.splitlines()[0]  # of the hub's answer, with its status
    return ConfigError(f"{config.source} ({where}) cannot be read: {reason} {_HINT}")
