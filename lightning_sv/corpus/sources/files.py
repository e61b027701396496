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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from lightning_sv.atomic import file_sha256, reading
from lightning_sv.corpus.config import CorpusConfig
from lightning_sv.corpus.manifest import Manifest
from lightning_sv.corpus.sources.document import BYTE_ORDER_MARK, Document, Source
from lightning_sv.errors import ConfigError, UnreadableError, expect

#: 2 GiB, the largest window of the zstd format; the library's own limit is 128 MiB
_ZSTD_WINDOW = 1 << 31


def files_source(config: CorpusConfig) -> Source:
    """Return the documents of files, folders and globs, in the order of their names."""
    paths, left_out = source_files(config)
    reader = _Reader(config)
    plain = all(_READERS[format] is _Reader.text and not packed for format, packed in map(_parts, paths))
    total = sum(path.stat().st_size for path in paths) if plain else None
    return Source(lambda: reader.read(paths), total, unreadable=reader.unreadable, left_out=dict(left_out))


def source_files(config: CorpusConfig) -> tuple[list[Path], dict[str, int]]:
    """Return the files of a source in order, each once, and the number left out per suffix."""
    known = ", ".join(_READERS)
    given = os.path.expanduser(config.location.strip())  # noqa: PTH111
    # A path may contain a comma. Path.exists would raise for a list that is longer than a path.
    parts = [given] if os.path.exists(given) else [part.strip() for part in config.location.split(",")]  # noqa: PTH110
    paths: dict[Path, None] = {}
    left_out = Counter[str]()
    for part in filter(None, parts):
        target = Path(part).expanduser()
        if target.is_file():
            if _parts(target)[0] not in _READERS:
                raise ConfigError(f"{target}: the suffix is unknown; expected one of {known}. Convert the file.")
            paths[target] = None
            continue
        names = [target] if target.is_dir() else _matches(target)
        reached = {path for name in names for path in (_walk(name) if name.is_dir() else [name])}
        # A file that links to folders reach by several paths is read once, by the first of them.
        found = {(os.path.realpath(path.parent), path.name): path for path in sorted(reached, reverse=True)}.values()
        files = {path for path in found if path.is_file() and _is_read(path, config.text_field)}
        skipped = Counter("".join(path.suffixes[-2:]) or "no suffix" for path in found if path not in files)
        rest = f" (skipped: {counted(skipped)})" if skipped else ""
        value = f"files:{part}, which matches no file{rest}"
        hint = f"A .json file needs JSON lines with {config.text_field!r}." if skipped[".json"] else "Check the path."
        expect(len(files) > 0, "source", value, f"the suffixes {known}. {hint}")
        paths.update(dict.fromkeys(sorted(files)))
        left_out += skipped
    return list(paths), left_out


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
    yield from (folder / name for folder, files in _folders(top) for name in files)


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
        with reading(path), _open(path) as file:
            first = file.readline().removeprefix(b"\xef\xbb\xbf")
        return first.startswith(b"{") and text_field in json.loads(first)
    except UnreadableError:
        raise
    except Exception:  # not JSON, or damaged
        return False


class _Reader:
    """Readers of the formats."""

    def __init__(self, config: CorpusConfig) -> None:
        self.text_field, self.errors = config.text_field, config.errors
        self.unreadable: set[str] = set()  # places omitted because they are not UTF-8

    def read(self, paths: Iterable[Path]) -> Iterator[Document]:
        """Yield the documents of files, each by the reader of its suffix."""
        for path in paths:
            try:
                with reading(path):
                    yield from _READERS[_parts(path)[0]](self, path)
            except ConfigError:
                raise
            except Exception as error:  # each compression and Parquet have errors of their own
                raise ConfigError(f"{path}: cannot be read ({error}); download it again, or remove it.") from error

    def text(self, path: Path) -> Iterator[Document]:
        """Yield a text file as one document."""
        with _open(path) as file:
            text = self._decoded(file.read(), str(path))
        yield from text_documents(text, str(path), self.text_field)

    def lines(self, path: Path) -> Iterator[Document]:
        """Yield one document per line of JSON."""
        with _open(path) as file:
            for number, line in enumerate(file, 1):
                where = f"{path}, line {number}"
                text = self._decoded(line, where).removeprefix(BYTE_ORDER_MARK).strip()
                if not text:
                    continue
                try:
                    record = json.loads(text)
                except (ValueError, RecursionError) as error:  # invalid JSON, or nested too deeply
                    raise ConfigError(f"{where}: invalid JSON ({error}); repair or remove the line.") from None
                value = record.get(self.text_field) if isinstance(record, dict) else None
                if isinstance(value, str) and self.errors != "strict":  # JSON can contain half of a surrogate pair
                    record[self.text_field] = self._decoded(value.encode("utf-8", "surrogatepass"), where)
                yield from record_documents(record, where, self.text_field)

    def parquet(self, path: Path) -> Iterator[Document]:
        """Yield one document per row of Parquet."""
        pyarrow, parquet = (needs(name, str(path)) for name in ("pyarrow", "pyarrow.parquet"))
        row = 0
        with parquet.ParquetFile(path) as table:
            names = table.schema_arrow.names
            if self.text_field not in names:
                raise ConfigError(f"{path}: has no column {self.text_field!r} among {names}; set text_field to one.")
            for batch in table.iter_batches(batch_size=1024, columns=[self.text_field]):
                column = batch.column(0)
                kind = column.type.value_type if pyarrow.types.is_dictionary(column.type) else column.type
                if kind in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
                    column = column.cast(pyarrow.large_binary())  # `_decoded` handles invalid UTF-8
                for value in column.to_pylist():
                    row += 1
                    where = f"{path}, row {row}"
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


def record_documents(record: Any, where: str, text_field: str) -> Iterator[Document]:
    """Yield the document of a record, as `text_documents`; reject a record without the text's key."""
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: expected a JSON object; write one object with a {text_field!r} key per line.")
    if text_field not in record:
        raise ConfigError(f"{where}: has no {text_field!r} among {sorted(record)}; set text_field to the text's key.")
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
        self._file, self._out = path.open("rb"), memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._out:
            left = b"" if self._frame is None else self._frame.unused_data
            ended = self._frame is None or self._frame.eof
            data = left if ended and left else self._file.read(1 << 17)
            if not data and not ended:
                raise EOFError("it ends inside a frame")
            if not data:
                return 0
            self._frame = self._new() if ended else self._frame
            self._out = memoryview(self._frame.decompress(data))
        n = min(len(buffer), len(self._out))
        buffer[:n], self._out = self._out[:n], self._out[n:]
        return n

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
_READERS: dict[str, Callable[[_Reader, Path], Iterator[Document]]] = {
    **dict.fromkeys((".txt", ".md", ".py"), _Reader.text),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), _Reader.lines),
    ".parquet": _Reader.parquet,
}


def file_states(config: CorpusConfig) -> dict[str, dict[str, Any]]:
    """Return size, modification time and hash of each file of a source of files; empty for other sources."""
    if not config.source.startswith("files:"):
        return {}
    return {str(path): _times(path) | {"sha256": file_sha256(path)} for path in source_files(config)[0]}


def changed_text(manifest: Manifest) -> str:
    """Return a phrase that names files that were added, removed or changed since the preparation; empty for none.

    Only sources of files are compared, if this user can find any of their files.
    """
    then = manifest.sources
    if not then:
        return ""
    try:
        found = source_files(CorpusConfig(**manifest.settings))[0]
    except (TypeError, ValueError, OSError):  # some text no longer exists, or this user may not read its folder
        found = [Path(name) for name in then if os.path.isfile(name)]  # noqa: PTH113 (Path.is_file would raise)
    now = {str(path): path for path in found}
    phrases = []
    for name in sorted(then.keys() | now.keys()) if now else ():
        if name not in then or name not in now:
            phrases.append(f"{name} is {'new' if name in now else 'gone'}")
        elif not _same(now[name], then[name]):
            phrases.append(f"{name} has changed")
    more = f", and {len(phrases) - 3:,} more" if len(phrases) > 3 else ""
    return ", ".join(phrases[:3]) + more


def _times(path: Path) -> dict[str, Any]:
    status = path.stat()
    return {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns}


def _same(path: Path, then: dict[str, Any]) -> bool:
    """Return True if a file is unchanged; it is hashed only if its time alone differs, as after a copy."""
    now = _times(path)
    if now.items() <= then.items():
        return True
    readable = now["bytes"] == then.get("bytes") and os.access(path, os.R_OK)
    return readable and file_sha256(path) == then.get("sha256")
