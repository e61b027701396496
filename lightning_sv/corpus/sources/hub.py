"""Documents from a Hugging Face dataset, streamed."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

from lightning_sv.corpus.config import CorpusConfig
from lightning_sv.corpus.sources.document import Document, Source
from lightning_sv.corpus.sources.files import needs, record_documents
from lightning_sv.errors import ConfigError

log = logging.getLogger(__name__)

#: timeout in seconds of the hub's first answer; `datasets` would retry silently for half a minute
WAIT_S = 10.0


def hub_source(config: CorpusConfig) -> Source:
    """Return the documents of a Hugging Face dataset or folder, streamed in the dataset's order."""
    datasets = needs("datasets", config.source)
    name = os.path.expanduser(config.location)  # noqa: PTH111
    subset, split, text_field = config.hf_subset, config.hf_split, config.text_field
    revision = None if Path(name).exists() else _hub_revision(config)

    def read() -> Iterator[Document]:
        where = f"subset {subset!r}, split {split!r}"
        try:
            rows = datasets.load_dataset(name, subset, split=split, streaming=True, revision=revision)
            for row, record in enumerate(rows, 1):
                where = f"{config.source}, row {row}"
                yield from record_documents(record, where, text_field)
                where = f"row {row + 1}"
        except ConfigError:
            raise
        except Exception as error:  # readers can raise anything
            raise _unreadable(config, where, error) from error

    return Source(read, packages={config.source: revision} if revision else {})


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
    hint = "Check the name, hf_subset, hf_split, HF_TOKEN and the network; without a network use files:PATH."
    return ConfigError(f"{config.source} ({where}) cannot be read: {reason} {hint}")
