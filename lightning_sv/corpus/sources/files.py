"""Documents from files on disk: one per text file, per line of JSON, per row of Parquet."""

import bz2
import gzip
import importlib
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

from lightning_sv.corpus.config import CorpusConfig
from lightning_sv.corpus.sources import document as limits
from lightning_sv.corpus.sources.document import Document, NotUtf8, Source, check_size
from lightning_sv.corpus.sources.find import find_files
from lightning_sv.errors import ConfigError

#: 2 GiB, the largest window of the zstd format; the library's own limit is 128 MiB
_ZSTD_WINDOW = 1 << 31
#: maximum size of Parquet's metadata; the library's default is exceeded by some writers
_PARQUET_LIMIT = (1 << 31) - 1
#: maximum number of files named in one error
_NAMED = 10


def files_source(config: CorpusConfig) -> Source:
    """Return the documents of files, folders and globs, in the order of their names.

    Raises:
        ConfigError: nothing matches, a suffix is unknown, a file cannot be read in the format of its suffix, or a
            record lacks the text field; the message names the file, and the line or row
    """
    paths, left_out = source_files(config)
    decode = _Decoder(config.errors)

    def read() -> Iterator[Document]:
        bad: list[str] = []
        for path in paths:
            try:
                for document in _READERS[_parts(path)[0]](path, config.text_field, decode):
                    if not bad:  # after an error, read on only to list all bad files
                        yield document
            except NotUtf8 as error:
                bad.append(str(error))
            except OSError as error:
                raise ConfigError(f"{path}: cannot be read ({error}); check or remove the file.") from error
        if bad:
            more = f"; and {len(bad) - _NAMED:,} more files" if len(bad) > _NAMED else ""
            raise ConfigError(
                f"{'; '.join(bad[:_NAMED])}{more}; convert to UTF-8, or set data.corpus.errors to replace or skip."
            )

    plain = all(_READERS[format] is _read_text and not packed for format, packed in map(_parts, paths))
    total = sum(path.stat().st_size for path in paths) if plain else None
    return Source(read, total, unreadable=decode.unreadable, left_out=dict(left_out))


def source_files(config: CorpusConfig) -> tuple[list[Path], dict[str, int]]:
    """Return the files of a source, and the number left out per kind; see `find_files`."""
    reads = partial(_is_read, text_field=config.text_field)
    paths, left_out = find_files(config.location, reads, ", ".join(_READERS))
    for path in paths:
        if _parts(path)[0] not in _READERS:
            raise ConfigError(
                f"{path}: the suffix is unknown; expected one of {', '.join(_READERS)}. Convert or remove the file."
            )
    return paths, left_out


def _parts(path: Path) -> tuple[str, str]:
    """Return the suffixes of a file's format and compression, in lower case."""
    name = path.name.lower()
    packed = next((suffix for suffix in _OPENERS if suffix and name.endswith(suffix)), "")
    format = Path(name.removesuffix(packed)).suffix
    return ("", packed) if packed and format == ".parquet" else (format, packed)


def _is_read(path: Path, text_field: str) -> bool:
    """Return True if a file in a folder is read; .json must have JSON lines with the text field."""
    format, _ = _parts(path)
    if format != ".json":
        return format in _READERS
    try:
        with _opened(path) as file:
            first = file.readline(limits.MAX_DOCUMENT_BYTES).removeprefix(b"\xef\xbb\xbf")
        return first.startswith(b"{") and text_field in _loads(first)
    except (ValueError, RecursionError, OSError):
        return False


class _Decoder:
    """Convert bytes to text according to the setting `errors`.

    Attributes:
        unreadable: places omitted because they are not UTF-8
    """

    def __init__(self, errors: str) -> None:
        self._errors = errors
        self.unreadable: set[str] = set()

    def __call__(self, raw: bytes, where: str) -> Iterator[str]:
        """Yield the text, or nothing if it is skipped; raise `NotUtf8` in strict mode."""
        try:
            yield raw.decode("utf-8", "replace" if self._errors == "replace" else "strict")
        except UnicodeDecodeError as error:
            if self._errors != "skip":
                raise NotUtf8(f"{where}: byte {error.start} is not UTF-8") from None
            self.unreadable.add(where)


def _read_text(path: Path, text_field: str, decode: _Decoder) -> Iterator[Document]:
    with _opened(path) as file:
        raw = file.read(limits.MAX_DOCUMENT_BYTES + 1)
    check_size(len(raw), str(path))
    for text in decode(raw, str(path)):
        yield from text_documents(text, str(path), text_field)


def _read_lines(path: Path, text_field: str, decode: _Decoder) -> Iterator[Document]:
    with _opened(path) as file:
        number = 0
        while line := file.readline(limits.MAX_DOCUMENT_BYTES + 1):
            number += 1
            where = f"{path}, line {number}"
            check_size(len(line), where)
            for text in decode(line, where):
                if text := text.removeprefix(limits.BYTE_ORDER_MARK).strip():
                    yield from _read_line(text, where, text_field)


def _read_line(line: str, where: str, text_field: str) -> Iterator[Document]:
    try:
        record = _loads(line)
    except (ValueError, RecursionError) as error:  # invalid JSON, or nested too deeply
        raise ConfigError(f"{where}: invalid JSON ({error}); repair or remove the line.") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: expected a JSON object; write one object with a {text_field!r} key per line.")
    if text_field not in record:
        raise ConfigError(f"{where}: has no {text_field!r} among {sorted(record)}; set text_field to the text's key.")
    yield from text_documents(record[text_field], where, text_field)


def _loads(line: str | bytes) -> Any:
    # Python rejects ints of over 4,300 digits, which JSON allows; numbers are not used here.
    return json.loads(line, parse_int=float)


def _read_parquet(path: Path, text_field: str, decode: _Decoder) -> Iterator[Document]:
    pyarrow, parquet = (needs(name, str(path)) for name in ("pyarrow", "pyarrow.parquet"))
    limit = {"thrift_string_size_limit": _PARQUET_LIMIT, "thrift_container_size_limit": _PARQUET_LIMIT}
    row = 0
    try:
        with parquet.ParquetFile(path, **limit) as table:
            names = table.schema_arrow.names
            if text_field not in names:
                raise ConfigError(f"{path}: has no column {text_field!r} among {names}; set text_field to one of them.")
            for batch in table.iter_batches(batch_size=1024, columns=[text_field]):
                column = batch.column(0)
                if pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type):
                    column = column.cast(pyarrow.large_binary())  # `decode` handles invalid UTF-8
                for value in column.to_pylist():
                    row += 1
                    where = f"{path}, row {row}"
                    for text in decode(value, where) if isinstance(value, bytes) else (value,):
                        yield from text_documents(text, where, text_field)
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{path}: cannot be read as Parquet after row {row} ({error}); download it again.") from None


def text_documents(value: Any, where: str, text_field: str) -> Iterator[Document]:
    """Yield one document for a text, none for an empty text; reject values that are not texts."""
    if not isinstance(value, str):
        raise ConfigError(
            f"{where}: {text_field!r} is of type {type(value).__name__}; expected text. Set text_field to another name."
        )
    if value.removeprefix(limits.BYTE_ORDER_MARK):
        yield Document.from_text(value, where)


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file and decompress it, with errors that name the file."""
    packed = _parts(path)[1]
    damage = [EOFError, zlib.error, lzma.LZMAError]
    if packed == ".zst":
        damage.append(needs("zstandard", str(path)).ZstdError)
    try:
        with _OPENERS[packed](path) as file:
            yield file
    except Exception as error:
        numberless = isinstance(error, OSError) and error.errno is None  # gzip and bz2 raise this for damaged data
        if not numberless and not isinstance(error, tuple(damage)):
            raise
        raise ConfigError(f"{path}: the compressed data is damaged ({error}); download the file again.") from None


@contextmanager
def _open_zstd(path: Path) -> Iterator[Any]:
    zstandard = needs("zstandard", str(path))
    with path.open("rb") as file:
        unpacked = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
        yield io.BufferedReader(unpacked.stream_reader(file, read_across_frames=True))


def needs(module: str, where: str) -> Any:
    """Import an optional package, or raise an error with its installation command."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        hint = f"make install-text, or pip install {module}"
        raise ConfigError(f"{where}: {module} is not installed ({error}); run {hint}.") from None


_OPENERS: dict[str, Callable[[Path], Any]] = {
    "": lambda path: path.open("rb"),
    ".gz": gzip.open,
    ".zst": _open_zstd,
    ".bz2": bz2.open,
    ".xz": lzma.open,
}
_READERS: dict[str, Callable[[Path, str, _Decoder], Iterator[Document]]] = {
    ".txt": _read_text,
    ".md": _read_text,
    ".py": _read_text,
    ".jsonl": _read_lines,
    ".ndjson": _read_lines,
    ".json": _read_lines,
    ".parquet": _read_parquet,
}
