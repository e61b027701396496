"""Documents from the rows of Parquet files."""

from collections.abc import Iterator
from typing import Any

from lightning_sv.corpus.parts import grouped
from lightning_sv.corpus.sources.document import Document, Slice, text_documents
from lightning_sv.corpus.sources.packages import needs
from lightning_sv.errors import ConfigError

#: rows that are in memory at once
_ROWS = 1024


def open_parquet(file: Any, name: str, text_field: str) -> Any:
    """Open a Parquet file that has the text's column."""
    needs("pyarrow", name)
    from pyarrow.parquet import ParquetFile

    table = ParquetFile(file, pre_buffer=True)
    names = table.schema_arrow.names
    if text_field not in names:
        found = f"{name}: has no column {text_field!r} among {names}"
        raise ConfigError(f"{found}; set text_field to one.")
    return table


def row_groups(name: str, state: str, file: Any, text_field: str, part_bytes: int) -> list[Slice]:
    """Return slices of consecutive row groups, of about `part_bytes` in all columns each."""
    table = open_parquet(file, name, text_field)

    def size_of(group: int) -> int:
        return int(table.metadata.row_group(group).total_byte_size)

    slices: list[Slice] = []
    for groups in grouped(range(table.num_row_groups), size_of, part_bytes):
        n_bytes = sum(map(size_of, groups))
        slices.append(Slice(name, groups[0], groups[-1] + 1, n_bytes, state))
    return slices


def read_parquet(file: Any, piece: Slice, text_field: str) -> Iterator[Document]:
    """Yield one document per row of the slice's row groups."""
    table = open_parquet(file, piece.name, text_field)
    groups = list(range(piece.start, piece.stop))
    rows_before = [table.metadata.row_group(group).num_rows for group in range(piece.start)]
    row = sum(rows_before)
    for batch in table.iter_batches(batch_size=_ROWS, row_groups=groups, columns=[text_field]):
        for text in batch.column(0).to_pylist():
            row += 1
            where = f"{piece.name}, row {row}"
            yield from text_documents(text, where, text_field)
