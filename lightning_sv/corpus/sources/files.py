"""Documents from files on disk: one per text file, per line of JSON, per row of Parquet."""

import bz2
import gzip
import importlib
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

from lightning_sv.corpus.config import CorpusConfig
from lightning_sv.corpus.sources import document as limits
from lightning_sv.corpus.sources.document import Document, Source, check_size
from lightning_sv.corpus.sources.find import find_files
from lightning_sv.errors import ConfigError

#: 2 GiB, the largest window of the zstd format; the library's own limit is 128 MiB
_ZSTD_WINDOW = 1 << 31


def files_source(config: CorpusConfig) -> Source:
    """Return the documents of files, folders and globs, in the order of their names.

    Raises:
        ConfigError: nothing matches, a suffix is unknown, a file cannot be read in the format of its suffix, or a
            record lacks the text field; the message names the file, and the line or row
    """
    paths, left_out = source_files(config)
    reader = _Reader(config.text_field, config.errors)
    plain = all(_READERS[format] is _Reader.text and not packed for format, packed in map(_parts, paths))
    total = sum(path.stat().st_size for path in paths) if plain else None
    return Source(lambda: reader.read(paths), total, unreadable=reader.unreadable, left_out=dict(left_out))


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
        return first.startswith(b"{") and text_field in json.loads(first)
    except (ValueError, RecursionError, OSError):
        return False


class _Reader:
    """Readers of the formats.

    Attributes:
        unreadable: places omitted because they are not UTF-8
    """

    def __init__(self, text_field: str, errors: str) -> None:
        self.text_field, self.errors = text_field, errors
        self.unreadable: set[str] = set()

    def read(self, paths: Iterable[Path]) -> Iterator[Document]:
        """Yield the documents of files, each by the reader of its suffix."""
        for path in paths:
            try:
                yield from _READERS[_parts(path)[0]](self, path)
            except OSError as error:
                raise ConfigError(f"{path}: cannot be read ({error}); check or remove the file.") from error

    def text(self, path: Path) -> Iterator[Document]:
        """Yield a text file as one document."""
        with _opened(path) as file:
            raw = file.read(limits.MAX_DOCUMENT_BYTES + 1)
        check_size(len(raw), str(path))
        yield from text_documents(self._decoded(raw, str(path)), str(path), self.text_field)

    def lines(self, path: Path) -> Iterator[Document]:
        """Yield one document per line of JSON."""
        with _opened(path) as file:
            number = 0
            while line := file.readline(limits.MAX_DOCUMENT_BYTES + 1):
                number += 1
                where = f"{path}, line {number}"
                check_size(len(line), where)
                if text := self._decoded(line, where).removeprefix(limits.BYTE_ORDER_MARK).strip():
                    yield from text_documents(_record_text(text, where, self.text_field), where, self.text_field)

    def parquet(self, path: Path) -> Iterator[Document]:
        """Yield one document per row of Parquet."""
        pyarrow, parquet = (needs(name, str(path)) for name in ("pyarrow", "pyarrow.parquet"))
        row = 0
        try:
            with parquet.ParquetFile(path) as table:
                names = table.schema_arrow.names
                if self.text_field not in names:
                    raise ConfigError(
                        f"{path}: has no column {self.text_field!r} among {names}; set text_field to one of them."
                    )
                for batch in table.iter_batches(batch_size=1024, columns=[self.text_field]):
                    column = batch.column(0)
                    if pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type):
                        column = column.cast(pyarrow.large_binary())  # `_decoded` handles invalid UTF-8
                    for value in column.to_pylist():
                        row += 1
                        where = f"{path}, row {row}"
                        text = self._decoded(value, where) if isinstance(value, bytes) else value
                        yield from text_documents(text, where, self.text_field)
        except pyarrow.ArrowException as error:
            raise ConfigError(
                f"{path}: cannot be read as Parquet after row {row} ({error}); download it again."
            ) from None

    def _decoded(self, raw: bytes, where: str) -> str:
        """Return the text according to the setting `errors`, empty if it is skipped."""
        try:
            return raw.decode("utf-8", "replace" if self.errors == "replace" else "strict")
        except UnicodeDecodeError as error:
            if self.errors == "strict":
                raise ConfigError(
                    f"{where}: byte {error.start} is not UTF-8; convert it, or set data.corpus.errors to replace or "
                    "skip."
                ) from None
        self.unreadable.add(where)
        return ""


def _record_text(line: str, where: str, text_field: str) -> Any:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # invalid JSON, or nested too deeply
        raise ConfigError(f"{where}: invalid JSON ({error}); repair or remove the line.") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: expected a JSON object; write one object with a {text_field!r} key per line.")
    if text_field not in record:
        raise ConfigError(f"{where}: has no {text_field!r} among {sorted(record)}; set text_field to the text's key.")
    return record[text_field]


def text_documents(value: Any, where: str, text_field: str) -> Iterator[Document]:
    """Yield one document for a text, none for an empty text; reject values that are not texts."""
    if not isinstance(value, str):
        raise ConfigError(
            f"{where}: {text_field!r} is of type {type(value).__name__}; expected text. Change text_field."
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


def _open_zstd(path: Path) -> IO[bytes]:
    unpacked = needs("zstandard", str(path)).ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
    return io.BufferedReader(unpacked.stream_reader(path.open("rb"), read_across_frames=True, closefd=True))


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
_READERS: dict[str, Callable[[_Reader, Path], Iterator[Document]]] = {
    **dict.fromkeys((".txt", ".md", ".py"), _Reader.text),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), _Reader.lines),
    ".parquet": _Reader.parquet,
}
