"""Documents from files on disk: one per text file, per line of JSON, per row of Parquet; and changes of the files."""

import bz2
import glob
import gzip
import importlib
import io
import json
import lzma
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from lightning_sv.atomic import file_sha256, reading
from lightning_sv.corpus.config import CorpusConfig
from lightning_sv.corpus.manifest import Manifest
from lightning_sv.corpus.sources.document import (
    BYTE_ORDER_MARK,
    Document,
    FileStates,
    Slice,
    Source,
    file_times,
)
from lightning_sv.errors import ConfigError, UnreadableError, expect

#: 2 GiB, the largest window of the zstd format; the library's own limit is 128 MiB
_ZSTD_WINDOW = 1 << 31
_ZSTD_INPUT = 1 << 17  # compressed bytes per read


def files_source(config: CorpusConfig, previous: Source | None, part_bytes: int) -> Source:
    """Return the documents of files, folders and globs, in the order of their names.

    A file of lines or row groups that is larger than `part_bytes` has several slices. Files whose
    size and time are those of the `previous` start are not hashed again.
    """
    paths, left_out = source_files(config)
    states = file_states(paths, previous.files if previous else {})
    reader = FileReader(config)
    slices: list[Slice] = []
    for path in paths:
        slices += reader.slices(path, states[str(path)]["sha256"], part_bytes)
    return Source(slices, reader, left_out=dict(left_out), files=states)


def source_files(config: CorpusConfig) -> tuple[list[Path], dict[str, int]]:
    """Return the files of a source in order, each once, and the number left out per suffix."""
    paths: dict[Path, None] = {}
    left_out = Counter[str]()
    for part in _named_paths(config.location):
        target = Path(part).expanduser()
        if target.is_file():
            _check_suffix(target)
            paths[target] = None
            continue
        reached = _reached_files(target)
        files = {path for path in reached if _is_read(path, config.text_field)}
        skipped = Counter(_suffixes(path) for path in reversed(reached) if path not in files)
        if not files:
            _refuse_no_files(part, skipped, config.text_field)
        paths.update(dict.fromkeys(sorted(files)))
        left_out += skipped
    return list(paths), left_out


def _named_paths(location: str) -> list[str]:
    """Split a list of paths at its commas, unless the whole is one path with commas in its name."""
    whole = os.path.expanduser(location.strip())  # noqa: PTH111
    # Path.exists would raise for a list that is longer than a path
    if os.path.exists(whole):  # noqa: PTH110
        return [whole]
    parts = [part.strip() for part in location.split(",")]
    return [part for part in parts if part]


def _check_suffix(path: Path) -> None:
    format, _ = _parts(path)
    if format not in _READERS:
        expected = f"one of {', '.join(_READERS)}. Convert the file."
        raise ConfigError(f"{path}: the suffix is unknown; expected {expected}")


def _reached_files(target: Path) -> list[Path]:
    """Return the files in a folder, or those that a glob matches, sorted.

    A file that links to folders reach by several paths is returned once, by the first of them.
    """
    roots = [target] if target.is_dir() else _matches(target)
    reached: set[Path] = set()
    for root in roots:
        reached.update(_walk(root) if root.is_dir() else [root])
    first_paths: dict[tuple[str, str], Path] = {}
    for path in sorted(reached):
        place = (os.path.realpath(path.parent), path.name)
        first_paths.setdefault(place, path)
    return list(first_paths.values())


def _suffixes(path: Path) -> str:
    return "".join(path.suffixes[-2:]) or "no suffix"


def _refuse_no_files(part: str, skipped: Counter[str], text_field: str) -> NoReturn:
    found = f"files:{part}, which matches no file"
    if skipped:
        found += f" (skipped: {counted(skipped)})"
    hint = "Check the path."
    if skipped[".json"]:
        hint = f"A .json file needs JSON lines with {text_field!r}."
    raise ConfigError(f"source is {found}; expected the suffixes {', '.join(_READERS)}. {hint}")


def counted(left_out: dict[str, int]) -> str:
    """Return a phrase with the numbers of files left out, the most frequent kinds first."""
    kinds = Counter(left_out).most_common()
    phrases = [f"{kind} {number:,}" for kind, number in kinds[:8] if number]
    return ", ".join(phrases) + (", ..." if len(kinds) > 8 else "")


def _refuse(error: OSError) -> None:
    raise error  # os.walk would skip the folder


def _matches(pattern: Path) -> Iterator[Path]:
    """Yield the paths that match a glob; `**` follows a link to a folder once, where glob.glob follows loops."""
    parts = pattern.parts
    while parts[-1:] == ("**",):  # all files of a folder
        parts = parts[:-1]
    if "**" not in parts:
        yield from map(Path, glob.glob(str(Path(*parts))))  # noqa: PTH207
        return
    first = parts.index("**")
    for top in glob.glob(str(Path(*parts[:first]))):  # noqa: PTH207
        for folder, _ in _folders(Path(top)):
            yield from _matches(Path(glob.escape(str(folder)), *parts[first + 1 :]))


def _folders(top: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield a folder and those in it, with their files; links to folders are followed once, hidden names skipped."""
    seen: set[str] = set()
    for folder, folders, files in os.walk(top, followlinks=True, onerror=_refuse):
        if (real := os.path.realpath(folder)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield Path(folder), [name for name in files if not name.startswith(".")]


def _walk(top: Path) -> Iterator[Path]:
    for folder, files in _folders(top):
        for name in files:
            yield folder / name


def _parts(path: Path) -> tuple[str, str]:
    """Return the suffixes of a file's format and compression, in lower case."""
    name = path.name.lower()
    packed = next((suffix for suffix in _OPENERS if suffix and name.endswith(suffix)), "")
    format = Path(name.removesuffix(packed)).suffix
    return ("", packed) if packed and format == ".parquet" else (format, packed)


def _is_read(path: Path, text_field: str) -> bool:
    """Return True if a file in a folder is read; .json must have JSON lines with the text field."""
    format, _ = _parts(path)
    if not path.is_file():
        return False
    if format != ".json":
        return format in _READERS
    try:
        with reading(path), _open(path) as file:
            first = file.readline().removeprefix(b"\xef\xbb\xbf")
        return first.startswith(b"{") and text_field in json.loads(first)
    except UnreadableError:
        raise
    except Exception:  # not JSON, or damaged
        return False


class FileReader:
    """Readers of the formats."""

    def __init__(self, config: CorpusConfig) -> None:
        self.text_field = config.text_field
        self.errors = config.errors
        self.unreadable: set[str] = set()

    def slices(self, path: Path, state: str, part_bytes: int) -> list[Slice]:
        """Return the slices of a file, of about `part_bytes` where its format allows a start in the middle."""
        size = path.stat().st_size
        format, packed = _parts(path)
        if size > part_bytes and format == ".parquet":
            with _naming(path), path.open("rb") as file:
                return row_groups(str(path), state, file, self.text_field, part_bytes)
        if size > part_bytes and format in LINES and not packed:
            starts = range(0, size, part_bytes)
            return [
                Slice(str(path), at, min(at + part_bytes, size), part_bytes, state) for at in starts
            ]
        return [Slice(str(path), n_bytes=size, state=state)]

    def read(self, piece: Slice) -> Iterator[Document]:
        """Yield the documents of a slice, by the reader of its suffix."""
        path = Path(piece.name)
        with _naming(path):
            yield from _READERS[_parts(path)[0]](self, path, piece)

    def text(self, path: Path, piece: Slice) -> Iterator[Document]:
        """Yield a text file as one document."""
        with _open(path) as file:
            text = self._decoded(file.read(), str(path))
        yield from text_documents(text, str(path), self.text_field)

    def lines(self, path: Path, piece: Slice) -> Iterator[Document]:
        """Yield one document per line of JSON that starts in the slice."""
        after = f" after byte {piece.start}" if piece.start else ""
        with _open(path) as file:
            for number, line in enumerate(_lines_between(file, piece), 1):
                where = f"{path}, line {number}{after}"
                text = self._decoded(line, where).removeprefix(BYTE_ORDER_MARK).strip()
                if not text:
                    continue
                try:
                    record = json.loads(text)
                except (ValueError, RecursionError) as error:  # invalid JSON, or nested too deeply
                    raise ConfigError(
                        f"{where}: invalid JSON ({error}); repair or remove the line."
                    ) from None
                value = record.get(self.text_field) if isinstance(record, dict) else None
                if (
                    isinstance(value, str) and self.errors != "strict"
                ):  # JSON can contain half of a surrogate pair
                    record[self.text_field] = self._decoded(
                        value.encode("utf-8", "surrogatepass"), where
                    )
                yield from record_documents(record, where, self.text_field)

    def parquet(self, path: Path, piece: Slice) -> Iterator[Document]:
        """Yield one document per row of the slice's row groups."""
        with path.open("rb") as file:
            yield from self.rows(open_parquet(file, piece.name, self.text_field), piece)

    def rows(self, table: Any, piece: Slice) -> Iterator[Document]:
        """Yield one document per row of row groups of a `pyarrow.parquet.ParquetFile`."""
        groups = range(piece.start, table.num_row_groups if piece.stop is None else piece.stop)
        row = sum(table.metadata.row_group(group).num_rows for group in range(piece.start))
        for batch in table.iter_batches(
            batch_size=1024, row_groups=list(groups), columns=[self.text_field]
        ):
            for value in _plain_column(batch.column(0)).to_pylist():
                row += 1
                where = f"{piece.name}, row {row}"
                text = self._decoded(value, where) if isinstance(value, bytes) else value
                yield from text_documents(text, where, self.text_field)

    def _decoded(self, raw: bytes, where: str) -> str:
        """Return the text according to the setting `errors`, empty if it is skipped."""
        try:
            return raw.decode("utf-8", "replace" if self.errors == "replace" else "strict")
        except UnicodeDecodeError as error:
            if self.errors == "strict":
                hint = "convert it, or set data.corpus.errors to replace or skip."
                raise ConfigError(f"{where}: byte {error.start} is not UTF-8; {hint}") from None
        self.unreadable.add(where)
        return ""


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the file in every error of its reader."""
    try:
        with reading(path):
            yield
    except ConfigError:
        raise
    except Exception as error:  # each compression and Parquet have errors of their own
        raise ConfigError(
            f"{path}: cannot be read ({error}); download it again, or remove it."
        ) from error


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
        raise ConfigError(
            f"{name}: has no column {text_field!r} among {names}; set text_field to one."
        )
    return table


def row_groups(name: str, state: str, file: Any, text_field: str, part_bytes: int) -> list[Slice]:
    """Return slices of consecutive row groups, each with about `part_bytes` of text before compression."""
    table = open_parquet(file, name, text_field)
    column = table.schema.names.index(text_field)
    slices: list[Slice] = []
    start = n_bytes = 0
    for group in range(table.num_row_groups):
        n_bytes += table.metadata.row_group(group).column(column).total_uncompressed_size
        is_last = group == table.num_row_groups - 1
        if is_last or n_bytes >= part_bytes:
            slices.append(Slice(name, start, group + 1, n_bytes, state))
            start = group + 1
            n_bytes = 0
    return slices


def _plain_column(column: Any) -> Any:
    """Return text as bytes, because `FileReader` handles invalid UTF-8; other columns are returned unchanged."""
    import pyarrow

    kind = column.type
    if pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    is_text = kind in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view())
    return column.cast(pyarrow.large_binary()) if is_text else column


def record_documents(record: Any, where: str, text_field: str) -> Iterator[Document]:
    """Yield the document of a record, as `text_documents`; reject a record without the text's key."""
    if not isinstance(record, dict):
        raise ConfigError(
            f"{where}: expected a JSON object; write one object with a {text_field!r} key per line."
        )
    if text_field not in record:
        raise ConfigError(
            f"{where}: has no {text_field!r} among {sorted(record)}; set text_field to the text's key."
        )
    yield from text_documents(record[text_field], where, text_field)


def text_documents(value: Any, where: str, text_field: str) -> Iterator[Document]:
    """Yield one document for a text without its byte order mark, none for an empty text or null; reject others."""
    if value is None:
        return
    kind = f"of type {type(value).__name__}"
    expect(isinstance(value, str), f"{where}: {text_field!r}", kind, "text. Change text_field.")
    if text := value.removeprefix(BYTE_ORDER_MARK):
        yield Document.from_text(text, where)


def _open(path: Path) -> Any:
    packed = _parts(path)[1]
    if packed and not path.stat().st_size:  # gzip takes it for an empty text
        raise EOFError("it has no bytes")
    return _OPENERS[packed](path)


class _ZstdFile(io.RawIOBase):
    """Content of a .zst file; zstandard's own reader takes a file that is cut off for a complete one."""

    def __init__(self, path: Path) -> None:
        library = needs("zstandard", str(path))
        self._new = lambda: library.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj()
        self._frame: Any = None
        self._file = path.open("rb")
        self._out = memoryview(b"")  # decompressed bytes that were not read yet

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._out:
            data = self._next_input()
            if not data:
                return 0
            self._out = memoryview(self._frame.decompress(data))
        n = min(len(buffer), len(self._out))
        buffer[:n] = self._out[:n]
        self._out = self._out[n:]
        return n

    def _next_input(self) -> bytes:
        """Return compressed bytes for the current frame, after opening a new one where one has ended."""
        if self._frame is not None and not self._frame.eof:
            data = self._file.read(_ZSTD_INPUT)
            if not data:
                raise EOFError("it ends inside a frame")
            return data
        left = b"" if self._frame is None else self._frame.unused_data
        data = left or self._file.read(_ZSTD_INPUT)
        if data:
            self._frame = self._new()
        return data

    def close(self) -> None:
        self._file.close()
        super().close()


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
    ".zst": lambda path: io.BufferedReader(_ZstdFile(path)),
    ".bz2": bz2.open,
    ".xz": lzma.open,
}
LINES = (".jsonl", ".ndjson", ".json")
_READERS: dict[str, Callable[[FileReader, Path, Slice], Iterator[Document]]] = {
    **dict.fromkeys((".txt", ".md", ".py"), FileReader.text),
    **dict.fromkeys(LINES, FileReader.lines),
    ".parquet": FileReader.parquet,
}


def file_states(paths: Sequence[Path], known: FileStates) -> FileStates:
    """Return size, modification time and hash of each file.

    A `known` file of equal size and time keeps its hash.
    """
    states: FileStates = {}
    to_hash: list[str] = []
    for path in paths:
        name = str(path)
        times = file_times(path)
        before = known.get(name, {})
        if times.items() <= before.items():
            states[name] = {**times, "sha256": before["sha256"]}
        else:
            states[name] = times
            to_hash.append(name)

    with ThreadPoolExecutor() as pool:
        hashes = pool.map(file_sha256, map(Path, to_hash))
        for name, digest in zip(to_hash, hashes, strict=True):
            states[name]["sha256"] = digest
    return states


def changed_text(manifest: Manifest) -> str:
    """Return a phrase that names files that were added, removed or changed since the preparation.

    It is empty without changes. Only sources of files are compared, if this user can find any of
    their files.
    """
    then = manifest.sources
    if not then:
        return ""
    now = {str(path): path for path in _files_now(manifest)}
    if not now:
        return ""
    phrases = []
    for name in sorted(then.keys() | now.keys()):
        if name not in then:
            phrases.append(f"{name} is new")
        elif name not in now:
            phrases.append(f"{name} is gone")
        elif not _same(now[name], then[name]):
            phrases.append(f"{name} has changed")
    text = ", ".join(phrases[:3])
    if len(phrases) > 3:
        text += f", and {len(phrases) - 3:,} more"
    return text


def _files_now(manifest: Manifest) -> list[Path]:
    """Return the files that the settings of a corpus name now, as far as this user can find them."""
    try:
        files, _ = source_files(CorpusConfig(**manifest.settings))
        return files
    except (
        TypeError,
        ValueError,
        OSError,
    ):  # some text is gone, or this user may not read its folder
        # Path.is_file would raise
        return [Path(name) for name in manifest.sources or () if os.path.isfile(name)]  # noqa: PTH113


def _same(path: Path, then: dict[str, Any]) -> bool:
    """Return True if a file is unchanged; it is hashed only if its time alone differs, as after a copy."""
    now = file_times(path)
    if now.items() <= then.items():
        return True
    readable = now["bytes"] == then.get("bytes") and os.access(path, os.R_OK)
    return readable and file_sha256(path) == then.get("sha256")
