"""Documents from the Parquet files of a Hugging Face dataset, by their row groups.

The client of the hub repeats a request after a time-out, a lost connection or an answer 408, 429 or
5xx up to five times, after 1, 2, 4, 8 and 8 seconds. After that the preparation ends, and the next
start goes on.
"""

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

from lightning_sv.corpus.config import CorpusConfig
from lightning_sv.corpus.sources.document import Document, Slice, Source
from lightning_sv.corpus.sources.formats import naming
from lightning_sv.corpus.sources.packages import needs
from lightning_sv.corpus.sources.parquet import read_parquet, row_groups
from lightning_sv.errors import expect, expect_known

log = logging.getLogger(__name__)

#: threads that read the ends of Parquet files, where their row groups are listed
_THREADS = 16
_HINT = (
    "Check the name, hf_subset, hf_split, HF_TOKEN, the network and its proxy (HTTPS_PROXY); "
    "without a network use files:PATH. The next start goes on where this one ended."
)


def hub_source(config: CorpusConfig, part_bytes: int) -> Source:
    """Return the documents of a dataset of the Hugging Face hub, in the dataset's order.

    `hf:NAME` has the newest revision. A preparation that was stopped goes on with an older one by
    `hf:NAME@REVISION`.
    """
    name = config.location
    expected = f"a dataset of the hub. Read a folder by files:{name}."
    expect(not Path(name).exists(), "source", config.source, expected)

    def groups_of(file: str) -> list[Slice]:
        with _open(file) as content:
            return row_groups(file, "", content, config.text_field, part_bytes)

    with naming(config.source, _HINT):
        files = _data_files(config)
        with ThreadPoolExecutor(_THREADS) as pool:
            slices = list(chain.from_iterable(pool.map(groups_of, files)))
    revision = files[0].partition("@")[2].partition("/")[0]  # of hf://datasets/NAME@REVISION/PATH
    log.info("reading revision %s of %s", revision, config.source)
    return Source(slices, packages={config.source: revision})


def _data_files(config: CorpusConfig) -> list[str]:
    """Return the addresses of the files of a subset and split, in order."""
    datasets = needs("datasets", config.source)
    name, _, revision = config.location.partition("@")
    builder = datasets.load_dataset_builder(name, config.hf_subset, revision=revision or None)
    of_split = builder.config.data_files or {}
    expect_known("hf_split", config.hf_split, of_split)
    files = [str(file) for file in of_split[config.hf_split]]
    for file in files:
        expected = "a .parquet file. Download the dataset, and read the folder by files:PATH."
        expect(file.endswith(".parquet"), config.source, file, expected)
    return files


def _open(file: str) -> Any:
    import fsspec

    return fsspec.open(file, "rb")


def read_dataset(piece: Slice, config: CorpusConfig) -> Iterator[Document]:
    """Yield one document per row of a slice."""
    with naming(config.source, _HINT), _open(piece.name) as file:
        yield from read_parquet(file, piece, config.text_field)
