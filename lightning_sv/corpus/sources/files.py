"""Documents from files on disk: one a text file, one a line of JSON, one a row of Parquet."""

import glob
import gzip
import importlib
import io
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from lightning_sv.corpus.sources.document import Document, Source

# A document is held in memory whole; a larger one is a collection, and belongs into .jsonl or .parquet.
MAX_DOCUMENT_BYTES = 1 << 30


def files_source(spec: str, *, text_field: str) -> Source:
    """Documents of files, folders and globs, in the order of their names.

    Args:
        spec: paths or globs, separated by commas. A folder stands for all files below it whose suffix is known;
            hidden ones are left out. A path with a comma in it cannot be written here: name its folder
        text_field: the key (.jsonl) or column (.parquet) with the text

    Raises:
        ValueError: nothing matches, a suffix is unknown, a file cannot be read as what its suffix says, or a
            record lacks the text field; the sentence names the file, and the line or row
    """
    paths = find_files(spec)

    def read() -> Iterator[Document]:
        for path in paths:
            try:
                yield from _read_file(path, text_field)
            except OSError as error:
                raise ValueError(f"{path}: cannot be read ({error}); check the file or leave it out.") from error

    compressed = any(path.suffix not in (".txt", ".md", ".py") for path in paths)
    return Source(read, total_bytes=None if compressed else sum(path.stat().st_size for path in paths))


def find_files(spec: str) -> list[Path]:
    """The files that a list of paths, folders and globs stands for, each once, in order."""
    paths: dict[Path, None] = {}
    is_one = os.path.exists(Path(spec).expanduser())  # noqa: PTH110 (Path.exists fails on a long list)
    parts = [spec] if is_one else spec.split(",")  # a name may hold commas
    for part in (part.strip() for part in parts):
        if not part:
            continue
        target = Path(part).expanduser()
        if target.is_dir():
            inside = sorted(path for path in target.rglob("*") if path.is_file() and _suffix(path))
            matches = [path for path in inside if not _hidden(path.relative_to(target))]
        elif target.is_file():
            matches = [target]
        else:
            names = glob.glob(str(target), recursive=True)  # noqa: PTH207 (Path.glob takes no absolute pattern)
            matches = [path for path in map(Path, sorted(names)) if path.is_file()]
        if not matches:
            raise ValueError(
                f"source=files:{part} matches no file with one of the suffixes {', '.join(_READERS)}; check the path."
            )
        for path in matches:
            if not _suffix(path):
                raise ValueError(
                    f"{path}: the suffix is not one of {', '.join(_READERS)}; convert the file or leave it out."
                )
            paths[path] = None
    return list(paths)


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _suffix(path: Path) -> str | None:
    return next((suffix for suffix in _READERS if path.name.lower().endswith(suffix)), None)


def _read_file(path: Path, text_field: str) -> Iterator[Document]:
    suffix = _suffix(path)
    assert suffix is not None, path  # find_files keeps no other
    yield from _READERS[suffix](path, text_field)


def _read_text(path: Path, text_field: str) -> Iterator[Document]:
    size = path.stat().st_size
    if size > MAX_DOCUMENT_BYTES:
        raise ValueError(
            f"{path}: one document of {size:,} bytes is over the limit of {MAX_DOCUMENT_BYTES:,}; "
            "split it, or write its parts as lines of a .jsonl file."
        )
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start} is not UTF-8; convert the file or leave it out.") from None
    if text:
        yield Document.from_text(text, str(path))


def _jsonl_reader(
    opener: Callable[[Path], AbstractContextManager[Iterable[bytes]]],
) -> Callable[[Path, str], Iterator[Document]]:
    def read(path: Path, text_field: str) -> Iterator[Document]:
        try:
            with opener(path) as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield from _read_line(line, f"{path}, line {number}", text_field)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path}: the compressed data is damaged ({error}); fetch the file again.") from None

    return read


def _read_line(line: bytes, where: str, text_field: str) -> Iterator[Document]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # bad JSON, bytes that are no UTF-8, brackets without end
        raise ValueError(f"{where}: no valid JSON ({error}); repair or remove the line.") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where}: not a JSON object; write one object with a {text_field!r} key a line.")
    if text_field not in record:
        raise ValueError(f"{where}: has no {text_field!r} among {sorted(record)}; set text_field to the text's key.")
    yield from text_documents(record[text_field], where, text_field)


def _read_parquet(path: Path, text_field: str) -> Iterator[Document]:
    pyarrow, parquet = (needs(name, str(path)) for name in ("pyarrow", "pyarrow.parquet"))
    row = 0
    try:
        with parquet.ParquetFile(path) as table:
            names = table.schema_arrow.names
            if text_field not in names:
                raise ValueError(f"{path}: has no column {text_field!r} among {names}; set text_field to one of them.")
            for batch in table.iter_batches(batch_size=1024, columns=[text_field]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    yield from text_documents(value, f"{path}, row {row}", text_field)
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: cannot be read as Parquet after row {row} ({error}); fetch it again.") from None


def text_documents(value: Any, where: str, text_field: str) -> Iterator[Document]:
    """One document if the value is a text, none if it is empty, an error if it is something else."""
    if not isinstance(value, str):
        raise ValueError(
            f"{where}: {text_field!r} holds {type(value).__name__} instead of text; set text_field to another name."
        )
    if value:
        yield Document.from_text(value, where)


@contextmanager
def _open_zstd(path: Path) -> Iterator[Iterable[bytes]]:
    zstandard = needs("zstandard", str(path))
    with path.open("rb") as file:
        try:
            yield io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True))
        except zstandard.ZstdError as error:
            raise EOFError(str(error)) from None  # what gzip raises


def needs(module: str, where: str) -> Any:
    """Import a package that only some sources need, or say how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        how = f"make install-text, or pip install {module}"
        raise ValueError(f"{where}: reading it needs {module} ({error}); {how}.") from None


_READERS: dict[str, Callable[[Path, str], Iterator[Document]]] = {
    ".txt": _read_text,
    ".md": _read_text,
    ".py": _read_text,
    ".jsonl": _jsonl_reader(lambda path: path.open("rb")),
    ".jsonl.gz": _jsonl_reader(partial(gzip.open, mode="rb")),
    ".jsonl.zst": _jsonl_reader(_open_zstd),
    ".parquet": _read_parquet,
}
