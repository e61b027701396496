"""Documents from a Hugging Face dataset, streamed."""

import glob
import logging
from collections.abc import Iterator
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from lightning_sv.corpus.config import CorpusConfig
from lightning_sv.corpus.sources.document import Document, Source
from lightning_sv.corpus.sources.files import needs, text_documents
from lightning_sv.corpus.sources.state import State, file_states
from lightning_sv.errors import ConfigError

log = logging.getLogger(__name__)

#: timeout in seconds of the hub's first answer; `datasets` would retry silently for half a minute
WAIT_S = 10.0


def hub_source(config: CorpusConfig) -> Source:
    """Return the documents of a Hugging Face dataset, folder or builder, streamed in the dataset's order."""
    name, text_field = f"hf:{config.location}", config.text_field

    def read() -> Iterator[Document]:
        stream = iter(_open(config))
        for row in count(1):
            try:
                record = next(stream, None)
            except Exception as error:  # readers can raise anything
                raise _unreadable(name, f"row {row}", error) from error
            if record is None:
                return
            if text_field not in record:
                raise ConfigError(
                    f"{name}, row {row}: has no column {text_field!r}; expected one of {sorted(record)}. "
                    "Set text_field to one of them."
                )
            yield from text_documents(record[text_field], f"{name}, row {row}", text_field)

    return Source(read)


def _open(config: CorpusConfig) -> Any:
    datasets = needs("datasets", config.source)
    name, subset, split, files = config.location, config.hf_subset, config.hf_split, _parts(config.hf_data_files)
    revision = None if files or Path(name).exists() else _hub_revision(name)
    try:
        return datasets.load_dataset(
            name, subset, split=split, data_files=files or None, streaming=True, revision=revision
        )
    except Exception as error:  # connection, missing dataset, unknown configuration or split, bad files
        raise _unreadable(config.source, f"subset {subset!r}, split {split!r}", error) from error


def hub_state(config: CorpusConfig, *, ask: bool) -> State:
    """Return the state of a dataset's local files, or with `ask` its revision on the hub."""
    local = Path(config.location)
    if local.exists():
        return file_states(sorted(path for path in (local, *local.rglob("*")) if path.is_file()))
    if parts := _parts(config.hf_data_files):
        names = (path for part in parts for path in glob.glob(part, recursive=True))  # noqa: PTH207
        return file_states(path for path in map(Path, sorted(names)) if path.is_file())
    needs("datasets", config.source)
    revision = _hub_revision(config.location) if ask else None
    return {config.source: {"revision": revision}} if revision else {}


def _parts(data_files: str | None) -> list[str]:
    return [part.strip() for part in data_files.split(",")] if data_files else []


@cache
def _hub_revision(name: str) -> str | None:
    """Return a dataset's revision on the hub, with a log message and a timeout; None if offline."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    if constants.HF_HUB_OFFLINE:  # `datasets` uses its cache, or fails at once
        return None
    hub = constants.ENDPOINT
    log.info("asking %s for %s, %g s at most", hub, name, WAIT_S)
    try:
        revision: str | None = HfApi(endpoint=hub).dataset_info(name, timeout=WAIT_S).sha
        return revision
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"hf:{name}: {hub} has no such dataset, or it needs a token in HF_TOKEN; check the name."
        ) from error
    except HfHubHTTPError as error:
        raise _unreadable(f"hf:{name}", "dataset", error) from error
    except Exception as error:  # errors of httpx or a proxy
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise ConfigError(
            f"hf:{name}: {hub} does not answer ({reason}); check the network, or use files:PATH without one."
        ) from error


def _unreadable(name: str, where: str, error: Exception) -> ConfigError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ConfigError(
        f"{name} ({where}) cannot be read: {reason} Check the name, hf_subset, hf_split, hf_data_files "
        "and the network; without a network use files:PATH."
    )
