"""Documents from a Hugging Face dataset, streamed."""

import glob
import logging
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from lightning_sv.corpus.sources.document import Document, Source
from lightning_sv.corpus.sources.files import needs, text_documents
from lightning_sv.corpus.sources.state import State, file_states
from lightning_sv.errors import ConfigError

log = logging.getLogger(__name__)

#: timeout in seconds of the hub's first answer; `datasets` would retry silently for half a minute
WAIT_S = 10.0


def hub_source(name: str, *, subset: str | None, split: str, data_files: str | None, text_field: str) -> Source:
    """Return the documents of a Hugging Face dataset split, streamed in the dataset's order.

    Args:
        name: a dataset of the hub ('HuggingFaceFW/fineweb-edu'), a local dataset folder, or a builder ('json')
        subset: configuration of the dataset, such as 'sample-10BT'
        split: split of the dataset, such as train
        data_files: files for the builder: a path, a glob, or several, separated by commas
        text_field: column with the text

    Raises:
        ConfigError: the dataset cannot be opened or read, or lacks the column
    """

    def read() -> Iterator[Document]:
        stream = iter(_open(name, subset, split, data_files))
        row = 0
        while True:
            row += 1
            try:
                record = next(stream, None)
            except Exception as error:  # readers can raise anything
                raise _unreadable(name, f"row {row}", error) from error
            if record is None:
                return
            if text_field not in record:
                raise ConfigError(
                    f"hf:{name}, row {row}: has no column {text_field!r}; expected one of {sorted(record)}. "
                    "Set text_field to one of them."
                )
            yield from text_documents(record[text_field], f"hf:{name}, row {row}", text_field)

    return Source(read)


def _open(name: str, subset: str | None, split: str, data_files: str | None) -> Any:
    datasets = needs("datasets", f"hf:{name}")
    revision = None if data_files or Path(name).exists() else _hub_revision(name)
    files = _parts(data_files) or None
    try:
        return datasets.load_dataset(name, subset, split=split, data_files=files, streaming=True, revision=revision)
    except Exception as error:  # connection, missing dataset, unknown configuration or split, bad files
        raise _unreadable(name, f"subset {subset!r}, split {split!r}", error) from error


def hub_state(name: str, data_files: str | None, *, ask: bool) -> State:
    """Return the state of a dataset's local files, or its revision on the hub.

    Args:
        name: dataset, folder or builder, as in `hub_source`
        data_files: files for a builder
        ask: if True, ask the hub; otherwise its datasets have no state

    Raises:
        ConfigError: the hub has no such dataset, or does not answer
    """
    local = Path(name)
    if local.exists():
        return file_states(sorted(path for path in (local, *local.rglob("*")) if path.is_file()))
    if data_files:
        names = (path for part in _parts(data_files) for path in glob.glob(part, recursive=True))  # noqa: PTH207
        return file_states(path for path in map(Path, sorted(names)) if path.is_file())
    needs("datasets", f"hf:{name}")
    revision = _hub_revision(name) if ask else None
    return {f"hf:{name}": {"revision": revision}} if revision else {}


def _parts(data_files: str | None) -> list[str]:
    return [part.strip() for part in data_files.split(",")] if data_files else []


@cache
def _hub_revision(name: str) -> str | None:
    """Return a dataset's revision on the hub, with a log message and a timeout; None if offline.

    Raises:
        ConfigError: the hub has no such dataset, or does not answer
    """
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
        refused = _unreadable(name, "dataset", error)
        raise refused from error
    except Exception as error:  # errors of httpx or a proxy
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise ConfigError(
            f"hf:{name}: {hub} does not answer ({reason}); check the network, or use files:PATH without one."
        ) from error


def _unreadable(name: str, where: str, error: Exception) -> ConfigError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ConfigError(
        f"hf:{name} ({where}) cannot be read: {reason} Check the name, hf_subset, hf_split, hf_data_files "
        "and the network; without a network use files:PATH."
    )
