"""Documents from a Hugging Face dataset: row groups of its Parquet files, or else its rows streamed in order.

The client of the hub repeats a request after a time-out, a lost connection or an answer 408, 429 or
5xx up to five times, after 1, 2, 4, 8 and 8 seconds. After that the preparation ends, and the next
start goes on.
"""

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

from lightning_sv.corpus.config import CorpusConfig
from lightning_sv.corpus.sources.document import Document, Slice, Source
from lightning_sv.corpus.sources.files import (
    FileReader,
    needs,
    open_parquet,
    record_documents,
    row_groups,
)
from lightning_sv.errors import ConfigError

log = logging.getLogger(__name__)

#: timeout in seconds of the hub's first answer; `datasets` would retry silently for half a minute
WAIT_S = 10.0
#: threads that read the ends of Parquet files, where their row groups are listed
_THREADS = 16
_ACCESS = "Set HF_TOKEN to a token of an account that may read it."
#: status of the hub's answer -> hint
HINTS = {
    401: _ACCESS,
    403: _ACCESS,
    404: "Check the name, hf_subset and hf_split; a private dataset needs HF_TOKEN.",
    429: "The hub limits requests: wait some minutes, or set HF_TOKEN. The next start goes on where this one ended.",
}
_SERVER_HINT = "The hub has a failure. The next start goes on where this one ended."
_OTHER_HINT = (
    "Check the name, hf_subset, hf_split, HF_TOKEN, the network and its proxy (HTTPS_PROXY); "
    "without a network use files:PATH."
)


def hub_source(config: CorpusConfig, previous: Source | None, part_bytes: int) -> Source:
    """Return the documents of a Hugging Face dataset or folder, in the dataset's order.

    A preparation goes on with the revision of its `previous` start, without asking for a newer one.
    """
    needs("datasets", config.source)
    if previous is not None:
        revision = previous.packages.get(config.source)
        if revision:
            log.info("going on with revision %s of %s", revision, config.source)
        return previous
    name = os.path.expanduser(config.location)  # noqa: PTH111
    revision = None if Path(name).exists() else _hub_revision(config)
    packages = {config.source: revision} if revision else {}
    return Source(_slices(config, name, revision, part_bytes), HubReader(config), packages=packages)


def _slices(config: CorpusConfig, name: str, revision: str | None, part_bytes: int) -> list[Slice]:
    where = _subset(config)
    try:
        files = _data_files(config, name, revision)
        if not all(str(file).endswith(".parquet") for file in files):
            return [Slice(name, state=revision or "")]
        with ThreadPoolExecutor(_THREADS) as pool:
            groups = pool.map(
                lambda file: _row_groups(file, revision or "", config.text_field, part_bytes), files
            )
            return list(chain.from_iterable(groups))
    except ConfigError:
        raise
    except Exception as error:  # readers can raise anything
        raise _unreadable(config, where, error) from error


def _data_files(config: CorpusConfig, name: str, revision: str | None) -> list[str]:
    """Return the addresses of the files of a subset and split, in order."""
    datasets = needs("datasets", config.source)
    builder = datasets.load_dataset_builder(name, config.hf_subset, revision=revision)
    files = builder.config.data_files or {}
    if config.hf_split not in files:
        raise ConfigError(
            f"hf_split is {config.hf_split}; expected one of {sorted(files)}, the splits of {name}."
        )
    return list(files[config.hf_split])


def _row_groups(file: str, revision: str, text_field: str, part_bytes: int) -> list[Slice]:
    with _open(file) as content:
        return row_groups(file, revision, content, text_field, part_bytes)


def _open(file: str) -> Any:
    import fsspec

    return fsspec.open(file, "rb")


class HubReader:
    """Reader of the rows of a dataset."""

    def __init__(self, config: CorpusConfig) -> None:
        self.config = config
        self._files = FileReader(config)
        self.unreadable = self._files.unreadable

    def read(self, piece: Slice) -> Iterator[Document]:
        """Yield one document per row."""
        config = self.config
        where = piece.name if piece.stop is not None else _subset(config)
        try:
            if piece.stop is None:
                yield from self._stream(piece)
                return
            with _open(piece.name) as file:
                yield from self._files.rows(
                    open_parquet(file, piece.name, config.text_field), piece
                )
        except ConfigError:
            raise
        except Exception as error:  # readers can raise anything
            raise _unreadable(config, where, error) from error

    def _stream(self, piece: Slice) -> Iterator[Document]:
        config = self.config
        datasets = needs("datasets", config.source)
        rows = datasets.load_dataset(
            piece.name,
            config.hf_subset,
            split=config.hf_split,
            streaming=True,
            revision=piece.state or None,
        )
        for row, record in enumerate(rows, 1):
            yield from record_documents(record, f"{config.source}, row {row}", config.text_field)


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
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    status = _status(error)
    hint = HINTS.get(status, _SERVER_HINT if status >= 500 else _OTHER_HINT)
    return ConfigError(f"{config.source} ({where}) cannot be read: {reason} {hint}")


def _status(error: BaseException | None) -> int:
    """Return the status of the hub's answer that caused an error, 0 without one."""
    while error is not None:
        response = getattr(error, "response", None)
        if response is not None:
            return int(response.status_code)
        error = error.__cause__ or error.__context__
    return 0
