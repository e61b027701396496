"""Documents from a Hugging Face dataset, streamed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning_sv.corpus.sources.document import Document, Source
from lightning_sv.corpus.sources.files import needs, text_documents


def hub_source(name: str, *, subset: str | None, split: str, data_files: str | None, text_field: str) -> Source:
    """Documents of one split of a Hugging Face dataset, in the dataset's own order, never all in memory.

    Args:
        name: a dataset of the hub ('HuggingFaceFW/fineweb-edu'), a local dataset folder, or a builder ('json')
        subset: its configuration, such as 'sample-10BT'
        split: split of the dataset, such as train
        data_files: files for the builder: a path, a glob, or several, separated by commas
        text_field: the column with the text

    Raises:
        ValueError: the dataset cannot be opened or read, or has no such column
    """

    def read() -> Iterator[Document]:
        stream = iter(_open(name, subset, split, data_files))
        row = 0
        while True:
            row += 1
            try:
                record = next(stream, None)
            except Exception as error:  # the library raises whatever its readers do
                raise _unreadable(name, f"row {row}", error) from error
            if record is None:
                return
            if text_field not in record:
                raise ValueError(
                    f"hf:{name}, row {row}: has no {text_field!r} among {sorted(record)}; "
                    "set text_field to one of them."
                )
            yield from text_documents(record[text_field], f"hf:{name}, row {row}", text_field)

    return Source(read)


def _open(name: str, subset: str | None, split: str, data_files: str | None) -> Any:
    datasets = needs("datasets", f"hf:{name}")
    files = [part.strip() for part in data_files.split(",")] if data_files else None
    try:
        return datasets.load_dataset(name, subset, split=split, data_files=files, streaming=True)
    except Exception as error:  # connection, missing dataset, unknown configuration or split, bad files
        raise _unreadable(name, f"subset {subset!r}, split {split!r}", error) from error


def _unreadable(name: str, where: str, error: Exception) -> ValueError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ValueError(
        f"hf:{name} ({where}) cannot be read: {reason} Check the name, hf_subset, hf_split, hf_data_files "
        "and the network; without a network use files:PATH."
    )
