"""Readers of the formats of files: text, JSON lines and Parquet, plain or compressed."""

import bz2
import gzip
import importlib
import json
import lzma
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_sv.atomic import reading
from lightning_sv.corpus.config import CorpusConfig
from lightning_sv.corpus.sources.document import (
    BYTE_ORDER_MARK,
    Document,
    Slice,
    decoded,
    read_text_file,
)
from lightning_sv.errors import ConfigError

#: suffixes of files with one JSON object per line
LINES = (".jsonl", ".ndjson")
#: rows of a Parquet file that are in memory at once
_ROWS = 1024
#: log2 of the largest window of the zstd format; the library's default is 27
_ZSTD_WINDOW_LOG = 31
#: package that reads zstd, part of Python since 3.14
ZSTD = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"


def needs(module: str, where: str) -> Any:
    """Import an optional package, or raise an error with its installation command."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        hint = f"make install-text, or pip install {module}"
        raise ConfigError(f"{where}: {module} is not installed ({error}); run {hint}.") from None


def _open_plain(path: Path) -> Any:
    return path.open("rb")


def _open_zstd(path: Path) -> Any:
    zstd = needs(ZSTD, str(path))
    options = {zstd.DecompressionParameter.window_log_max: _ZSTD_WINDOW_LOG}
    return zstd.open(path, "rb", options=options)


#: suffix of a compression -> function that opens a file
_OPENERS: dict[str, Callable[[Path], Any]] = {
    "": _open_plain,
    ".gz": gzip.open,
    ".zst": _open_zstd,
    ".bz2": bz2.open,
    ".xz": lzma.open,
}


@dataclass(frozen=True)
class FileFormat:
    """Format and compression of a file: suffixes of its name, in lower case.

    >>> FileFormat.of(Path("texts.JSONL.gz"))
    FileFormat(suffix='.jsonl', compression='.gz')
    """

    suffix: str
    compression: str

    @classmethod
    def of(cls, path: Path) -> "FileFormat":
        """Read the format of a file off its name."""
        name = path.name.lower()
        compression = Path(name).suffix
        if compression not in _OPENERS:
            compression = ""
        suffix = Path(name.removesuffix(compression)).suffix
        if compression and suffix == ".parquet":  # it has a compression of its own
            suffix = ""
        return cls(suffix, compression)

    @property
    def is_known(self) -> bool:
        """True if there is a reader."""
        return self.suffix in READERS

    @property
    def has_lines(self) -> bool:
        """True if reading can start at any byte, with the next line."""
        return self.suffix in LINES and not self.compression


def open_file(path: Path) -> Any:
    """Open a file as bytes, decompressed.

    Raises:
        EOFError: a compressed file has no bytes, which gzip takes for an empty text
    """
    compression = FileFormat.of(path).compression
    if compression and not path.stat().st_size:
        raise EOFError("it has no bytes")
    return _OPENERS[compression](path)


class FileReader:
    """Reader of all formats."""

    def __init__(self, config: CorpusConfig) -> None:
        self.text_field = config.text_field

    def slices(self, path: Path, state: str, part_bytes: int) -> list[Slice]:
        """Return the slices of a file, of about `part_bytes` if it can be read from the middle."""
        size = path.stat().st_size
        file_format = FileFormat.of(path)
        if size > part_bytes and file_format.suffix == ".parquet":
            with naming(path), path.open("rb") as file:
                return row_groups(str(path), state, file, self.text_field, part_bytes)
        if size > part_bytes and file_format.has_lines:
            return _byte_ranges(path, size, state, part_bytes)
        return [Slice(str(path), n_bytes=size, state=state)]

    def read(self, piece: Slice) -> Iterator[Document]:
        """Yield the documents of a slice, by the reader of its suffix."""
        path = Path(piece.name)
        reader = READERS[FileFormat.of(path).suffix]
        with naming(path):
            yield from reader(self, path, piece)

    def text(self, path: Path, piece: Slice) -> Iterator[Document]:
        """Yield a text file as one document."""
        with open_file(path) as file:
            text = decoded(read_text_file(file, str(path)), str(path))
        yield from text_documents(text, str(path), self.text_field)

    def lines(self, path: Path, piece: Slice) -> Iterator[Document]:
        """Yield one document per line of JSON that starts in the slice."""
        after = f" after byte {piece.start}" if piece.start else ""
        with open_file(path) as file:
            for number, line in enumerate(_lines_between(file, piece), 1):
                yield from self._line(line, f"{path}, line {number}{after}")

    def _line(self, line: bytes, where: str) -> Iterator[Document]:
        """Yield the document of a line; none for an empty line."""
        text = decoded(line, where).strip()
        if not text:
            return
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:  # invalid JSON, or nested too deeply
            found = f"{where}: invalid JSON ({error})"
            raise ConfigError(f"{found}; repair or remove the line.") from None

        value = record_text(record, where, self.text_field)
        yield from text_documents(value, where, self.text_field)

    def parquet(self, path: Path, piece: Slice) -> Iterator[Document]:
        """Yield one document per row of the slice's row groups."""
        with path.open("rb") as file:
            yield from self.rows(open_parquet(file, piece.name, self.text_field), piece)

    def rows(self, table: Any, piece: Slice) -> Iterator[Document]:
        """Yield one document per row of row groups of a `pyarrow.parquet.ParquetFile`."""
        stop = table.num_row_groups if piece.stop is None else piece.stop
        groups = list(range(piece.start, stop))
        before = range(piece.start)
        row = sum(table.metadata.row_group(group).num_rows for group in before)
        columns = [self.text_field]
        for batch in table.iter_batches(batch_size=_ROWS, row_groups=groups, columns=columns):
            for value in _undecoded(batch.column(0)).to_pylist():
                row += 1
                where = f"{piece.name}, row {row}"
                text = decoded(value, where) if isinstance(value, bytes) else value
                yield from text_documents(text, where, self.text_field)


#: suffix -> reader of a slice
READERS: dict[str, Callable[[FileReader, Path, Slice], Iterator[Document]]] = {
    **dict.fromkeys((".txt", ".md", ".py"), FileReader.text),
    **dict.fromkeys(LINES, FileReader.lines),
    ".parquet": FileReader.parquet,
}


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in every error of its reader."""
    try:
        with reading(path):
            yield
    except ConfigError:
        raise
    except MemoryError as error:
        hint = "split it, or use fewer --workers."
        raise ConfigError(f"{path}: there is too little memory for it; {hint}") from error
    except Exception as error:  # each compression and Parquet have errors of their own
        found = f"{path}: cannot be read ({error})"
        raise ConfigError(f"{found}; download it again, or remove it.") from error


def _byte_ranges(path: Path, size: int, state: str, part_bytes: int) -> list[Slice]:
    slices = []
    for start in range(0, size, part_bytes):
        stop = min(start + part_bytes, size)
        slices.append(Slice(str(path), start, stop, part_bytes, state))
    return slices


def _lines_between(file: Any, piece: Slice) -> Iterator[bytes]:
    """Yield the lines of a file that start in a slice; the last one may end after it."""
    position = piece.start
    if piece.start:
        file.seek(piece.start - 1)
        position += len(file.readline()) - 1  # the end of a line that starts before the slice
    for line in file:
        if piece.stop is not None and position >= piece.stop:
            return
        position += len(line)
        yield line


def open_parquet(file: Any, name: str, text_field: str) -> Any:
    """Open a Parquet file that has the text's column."""
    needs("pyarrow", name)
    table = needs("pyarrow.parquet", name).ParquetFile(file, pre_buffer=True)
    names = table.schema_arrow.names
    if text_field not in names:
        found = f"{name}: has no column {text_field!r} among {names}"
        raise ConfigError(f"{found}; set text_field to one.")
    return table


def row_groups(name: str, state: str, file: Any, text_field: str, part_bytes: int) -> list[Slice]:
    """Return slices of consecutive row groups, of about `part_bytes` of text each."""
    table = open_parquet(file, name, text_field)
    column = table.schema.names.index(text_field)
    slices: list[Slice] = []
    start = 0
    n_bytes = 0
    for group in range(table.num_row_groups):
        n_bytes += table.metadata.row_group(group).column(column).total_uncompressed_size
        is_last = group == table.num_row_groups - 1
        if is_last or n_bytes >= part_bytes:
            slices.append(Slice(name, start, group + 1, n_bytes, state))
            start = group + 1
            n_bytes = 0
    return slices


def _undecoded(column: Any) -> Any:
    """Return a column of text as bytes, because its text need not be UTF-8; any other as it is."""
    import pyarrow

    kind = column.type
    if pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    is_text = kind in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view())
    return column.cast(pyarrow.large_binary()) if is_text else column


def record_text(record: Any, where: str, text_field: str) -> Any:
    """Return the value of the text's key.

    Raises:
        ConfigError: the record is not a JSON object, or lacks the key
    """
    if not isinstance(record, dict):
        hint = f"write one object with a {text_field!r} key per line."
        raise ConfigError(f"{where}: expected a JSON object; {hint}")
    if text_field not in record:
        found = f"{where}: has no {text_field!r} among {sorted(record)}"
        raise ConfigError(f"{found}; set text_field to the text's key.")
    return record[text_field]


def text_documents(value: Any, where: str, text_field: str) -> Iterator[Document]:
    """Yield the document of a text without its byte order mark; none if it is empty or null.

    Raises:
        ConfigError: the value is no text
    """
    if value is None:
        return
    if not isinstance(value, str):
        found = f"{where}: {text_field!r} is of type {type(value).__name__}"
        raise ConfigError(f"{found}; expected text. Change text_field.")
    text = value.removeprefix(BYTE_ORDER_MARK)
    if text:
        yield Document.from_text(text, where)
