"""Files of documents: text, JSON lines and Parquet, plain or compressed."""

import bz2
import gzip
import json
import lzma
import reprlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from lightning_sv.atomic import reading
from lightning_sv.corpus.config import CorpusConfig
from lightning_sv.corpus.sources.document import (
    MAX_DOCUMENT_BYTES,
    Document,
    Slice,
    check_size,
    text_documents,
)
from lightning_sv.corpus.sources.packages import needs
from lightning_sv.corpus.sources.parquet import read_parquet, row_groups
from lightning_sv.errors import ConfigError

#: suffixes of files with one JSON object per line
LINES = (".jsonl", ".ndjson")
#: log2 of the largest window of the zstd format; the library's default is 27
_ZSTD_WINDOW_LOG = 31
#: package that reads zstd, part of Python since 3.14
ZSTD = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"


def _open_zstd(path: Path) -> Any:
    zstd = needs(ZSTD, str(path))
    options = {zstd.DecompressionParameter.window_log_max: _ZSTD_WINDOW_LOG}
    return zstd.open(path, "rb", options=options)


#: suffix of a compression -> function that opens a file
_OPENERS: dict[str, Callable[[Path], Any]] = {
    "": partial(open, mode="rb"),
    ".gz": gzip.open,
    ".zst": _open_zstd,
    ".bz2": bz2.open,
    ".xz": lzma.open,
}


def suffixes(path: Path) -> tuple[str, str]:
    """Return the suffixes of a file's format and of its compression, in lower case.

    >>> suffixes(Path("texts.JSONL.gz"))
    ('.jsonl', '.gz')
    """
    name = path.name.lower()
    compression = Path(name).suffix
    if compression not in _OPENERS:
        compression = ""
    return Path(name.removesuffix(compression)).suffix, compression


def open_file(path: Path) -> Any:
    """Open a file as bytes, decompressed.

    Raises:
        EOFError: a compressed file has no bytes, which gzip takes for an empty text
    """
    _, compression = suffixes(path)
    if compression and not path.stat().st_size:
        raise EOFError("it has no bytes")
    return _OPENERS[compression](path)


@contextmanager
def naming(where: str, hint: str = "Repair it, download it again, or remove it.") -> Iterator[None]:
    """Name a file or a dataset in every error of its reader, which can raise anything."""
    try:
        with reading(where):
            yield
    except (ConfigError, MemoryError):
        raise
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        reason = message.splitlines()[0]  # of the hub's answer, with its status
        raise ConfigError(f"{where} cannot be read ({reason}). {hint}") from error


def file_slices(path: Path, state: str, text_field: str, part_bytes: int) -> list[Slice]:
    """Return the slices of a file, of about `part_bytes` if it can be read from the middle."""
    name = str(path)
    suffix, compression = suffixes(path)
    if suffix == ".parquet":
        with naming(name), path.open("rb") as file:
            return row_groups(name, state, file, text_field, part_bytes)
    size = path.stat().st_size
    if suffix not in LINES or compression:
        return [Slice(name, n_bytes=size, state=state)]

    slices = []
    for start in range(0, size, part_bytes):
        stop = min(start + part_bytes, size)
        slices.append(Slice(name, start, stop, stop - start, state))
    return slices


def read_file(piece: Slice, config: CorpusConfig) -> Iterator[Document]:
    """Yield the documents of a slice, by the reader of its suffix."""
    path = Path(piece.name)
    suffix, _ = suffixes(path)
    read = READERS[suffix]
    with naming(piece.name), open_file(path) as file:
        yield from read(file, piece, config.text_field)


def read_text(file: Any, piece: Slice, text_field: str) -> Iterator[Document]:
    """Yield a text file as one document."""
    raw = file.read(MAX_DOCUMENT_BYTES + 1)  # no more of a file that is too large
    check_size(raw, piece.name)
    yield from text_documents(raw.decode("utf-8"), piece.name, text_field)


def read_lines(file: Any, piece: Slice, text_field: str) -> Iterator[Document]:
    """Yield one document per line of JSON that starts in the slice."""
    after = ""
    if piece.start:
        after = f" after byte {piece.start}"
    for number, line in enumerate(_lines_between(file, piece), 1):
        where = f"{piece.name}, line {number}{after}"
        if line.strip():
            yield from text_documents(_record_text(line, where, text_field), where, text_field)


def _lines_between(file: Any, piece: Slice) -> Iterator[bytes]:
    """Yield the lines of a file that start in a slice; the last one may end after it."""
    position = piece.start
    if piece.start:
        file.seek(piece.start - 1)
        position += len(file.readline()) - 1  # the end of a line that starts before the slice
    for line in file:
        if position >= piece.stop:
            return
        position += len(line)
        yield line


def _record_text(line: bytes, where: str, text_field: str) -> Any:
    """Return the value of the text's key in a line of JSON."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # not UTF-8, invalid, or nested too deeply
        found = f"{where}: invalid JSON ({error})"
        raise ConfigError(f"{found}; repair or remove the line.") from None
    if not isinstance(record, dict) or text_field not in record:
        found = f"{where}: has no {text_field!r} in {reprlib.repr(record)}"
        raise ConfigError(f"{found}; set text_field to the text's key.")
    return record[text_field]


#: suffix -> reader of a slice of an open file
READERS: dict[str, Callable[[Any, Slice, str], Iterator[Document]]] = {
    **dict.fromkeys((".txt", ".md", ".py"), read_text),
    **dict.fromkeys(LINES, read_lines),
    ".parquet": read_parquet,
}
