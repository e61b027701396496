"""Sources: the same documents from every format, and errors that name file and line."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import platform
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from lightning_sv.corpus import CorpusConfig
from lightning_sv.corpus.sources import document as document_module
from lightning_sv.corpus.sources.document import Document, Source
from lightning_sv.corpus.sources.formats import ZSTD
from lightning_sv.corpus.sources.kinds import SOURCES, read_slices
from lightning_sv.corpus.sources.packages import needs
from lightning_sv.corpus.sources.split import needs_cuts, split_document, unique
from lightning_sv.errors import ConfigError


def open_source(source: str, part_bytes: int = 1 << 30, **settings: object) -> Source:
    config = CorpusConfig(source=source, **settings)
    return SOURCES[config.kind].open(config, part_bytes)


def read(source: str, part_bytes: int = 1 << 30, **settings: object) -> list[Document]:
    slices = open_source(source, part_bytes, **settings).slices
    return list(read_slices(slices, CorpusConfig(source=source, **settings)))


def _texts(source: str, part_bytes: int = 1 << 30, **settings: object) -> list[str]:
    return [document.text for document in read(source, part_bytes, **settings)]


def _parquet(**columns: list[str]) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()


def _zstd(raw: bytes) -> bytes:
    """Return two frames, as tools that append to a file write them, with a window beyond the
    library's default."""
    zstd = needs(ZSTD, "tests")
    options = {zstd.CompressionParameter.window_log: 28}
    frames = b""
    for part in (raw[: len(raw) // 2], raw[len(raw) // 2 :]):
        compressor = zstd.ZstdCompressor(options=options)  # in a stream, of unknown size
        frames += compressor.compress(part) + compressor.flush()
    return frames


def _pack(name: str, texts: list[str]) -> bytes:
    """Return the content of a file: its first text, or records of all texts, in the format of its
    name."""
    if name.endswith(".parquet"):
        return _parquet(text=texts, id=texts)
    records = "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in texts)
    pack = {".gz": gzip.compress, ".zst": _zstd, ".bz2": bz2.compress, ".xz": lzma.compress}
    is_text = {".txt", ".md"} & set(Path(name.lower()).suffixes)
    return pack.get(Path(name).suffix.lower(), bytes)((texts[0] if is_text else records).encode())


RECORDS = [f"a.{kind}" for kind in ("ndjson", "JSONL", "parquet")]
RECORDS += [f"a.jsonl.{kind}" for kind in ("gz", "zst", "bz2", "xz")]


@pytest.mark.parametrize("name", RECORDS)
def test_files_source_every_format_has_the_same_documents(
    name: str, tmp_path: Path, texts: list[str]
) -> None:
    (tmp_path / name).write_bytes(_pack(name, texts))
    assert _texts(f"files:{tmp_path / name}") == texts


def test_files_source_folder_has_a_document_per_text_file(tmp_path: Path, texts: list[str]) -> None:
    for number, text in enumerate(texts):
        name = f"{number:03}.{['TXT', 'txt.gz', 'md.XZ'][number % 3]}"
        (tmp_path / name).write_bytes(_pack(name, ["\ufeff" * (number % 2) + text]))
    (tmp_path / "logo.png").write_bytes(b"\x89PNG")  # in a folder, only known suffixes count
    (tmp_path / ".hidden.txt").write_text("hidden")
    assert _texts(f"files:{tmp_path}") == texts


def test_files_source_counts_skipped_files_and_follows_links_once(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    other = tmp_path / "other"
    for folder in (notes / "sub", other):
        folder.mkdir(parents=True)
    (notes / "a.txt").write_text("a")
    (notes / "sub" / "rows.jsonl").write_text('{"text": "rows"}\n')
    (other / "b.md").write_text("b")
    for name in ("x.PDF", "sub/y.PDF", "z.tar.gz", "package.json", "Makefile"):
        (notes / name).write_text('{\n "name": 1}')
    links = {
        "link": other,
        "loop": notes,
        "sub/loop": notes,
        "self": notes / "self",
        "absent": tmp_path / "nothing",
    }
    for name, target in links.items():
        (notes / name).symlink_to(target)
    os.mkfifo(notes / "pipe.txt")
    assert _texts(f"files:{notes}") == ["a", "b", "rows"]
    assert open_source(f"files:{notes}").left_out == {
        ".PDF": 2,
        ".tar.gz": 1,
        ".json": 1,
        "no suffix": 3,
        ".txt": 1,
    }
    with pytest.raises(ConfigError, match=r"source is .*q\.png"):
        (tmp_path / "q.png").write_text("")
        _texts(f"files:{tmp_path}/q.png")


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", *RECORDS])
def test_files_source_limits_documents_and_drops_the_byte_order_mark(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document_module, "MAX_DOCUMENT_BYTES", 1000)
    path = tmp_path / name
    path.write_bytes(_pack(name, ["\ufeff" + "x" * 900]))
    assert _texts(f"files:{path}") == ["x" * 900]
    contents = [_pack(name, ["x" * 1001])]
    if name == "a.txt":  # no more is read, so what is not UTF-8 is not found
        contents.append(b"x" * 1001 + b"\xff")
    for too_long in contents:
        path.write_bytes(too_long)
        with pytest.raises(ConfigError, match=rf"{name}.*1,000 bytes"):
            _texts(f"files:{path}")


def test_files_source_invalid_utf8_in_parquet_is_named(tmp_path: Path) -> None:
    column = pyarrow.array([b"one", b"\xe9", b"two"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"a\.parquet .*utf-8"):
        _texts(f"files:{tmp_path}")


def test_files_source_nested_column_is_named(tmp_path: Path) -> None:
    """As the messages of a data set of chats; a large file is sliced by its row groups."""
    messages = [[{"role": "user", "content": "text"}]]
    pyarrow.parquet.write_table(pyarrow.table({"messages": messages}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="row 1: 'messages' is of type list"):
        _texts(f"files:{tmp_path}", 1, text_field="messages")


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
@pytest.mark.parametrize("part_bytes", [1, 999, 10_000, 50_000])
def test_files_source_slices_of_a_file_have_its_documents_once(
    name: str, part_bytes: int, tmp_path: Path, texts: list[str]
) -> None:
    path = tmp_path / name
    if name == "a.parquet":
        pyarrow.parquet.write_table(
            pyarrow.table({"id": texts, "text": texts}), path, row_group_size=7
        )
    else:
        path.write_bytes(b"\n" + _pack(name, texts))
    assert len(open_source(f"files:{path}", part_bytes).slices) > 1
    documents = read(f"files:{path}", part_bytes)
    assert [document.text for document in documents] == texts
    if name == "a.parquet":
        rows = [f"{path}, row {number}" for number in range(1, len(texts) + 1)]
        assert [document.where for document in documents] == rows


def test_files_source_reads_each_file_once_in_order_without_empty_texts(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.md").write_text(name)
    (tmp_path / "d.txt").write_text("")
    (tmp_path / "e.jsonl").write_text('{"text": ""}\n\n{"text": null}\n{"text": "e"}\n')
    assert _texts(f"files:{tmp_path}/c.md, {tmp_path}/b.md,{tmp_path}") == ["c", "b", "a", "e"]


@pytest.mark.parametrize(("name", "module"), [("a.parquet", "pyarrow"), ("a.jsonl.zst", ZSTD)])
def test_missing_package_is_named(
    name: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_text("x")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"{name}: {module} "):
        _texts(f"files:{tmp_path / name}")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.pdf", b"x", r"a\.pdf"),
        ("a.jsonl", b'{"text": "x"}\n{"text": ', r"a\.jsonl, line 2"),
        ("a.jsonl", b'\n{"body": "x"}\n', r"a\.jsonl, line 2"),
        ("a.jsonl", b'{"text": 1}\n', r"a\.jsonl, line 1"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"a\.jsonl cannot be read .*surrogates"),
        ("a.jsonl.gz", b"", r"a\.jsonl\.gz"),
        ("a.txt.zst", _zstd(b"text " * 99_999)[:-3], r"a\.txt\.zst"),
        ("a.parquet", _parquet(body=["x"]), r"a\.parquet: .*'text'"),
        ("a.py", b"\xef\xbb\xbfcaf\xe9", r"a\.py .*0xe9 in position 6"),
        ("a.jsonl", b'{"text": "one"}\n{"text": "\xe9"}\n', r"a\.jsonl, line 2: .*position 10"),
    ],
)
def test_files_source_bad_file_is_named(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        _texts(f"files:{tmp_path / name}")


@pytest.mark.parametrize(
    ("source", "settings", "message"),
    [
        ("files:{}/*.jsonl", {}, r"source is files:.*\*\.jsonl"),  # a glob is no path
        ("hf:{}", {}, "files:"),
    ],
)
def test_source_missing_name_is_named(
    source: str, settings: dict[str, str], message: str, jsonl: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        _texts(source.format(jsonl.parent), **settings)


def test_unique_documents_drops_duplicates_before_the_limit() -> None:
    documents = [Document.from_text(text, "") for text in ("aa", "bb", "aa", "cc", "dd")]
    assert [document.text for document in unique(documents, 6)] == ["aa", "bb", "cc"]


def test_document_split_depends_on_its_text_only() -> None:
    documents = [Document.from_text(str(number), "") for number in range(4000)]
    held = {d.text for d in documents if d.split(0.1) == "val"}
    assert 320 < len(held) < 480  # binomial: 400, standard deviation 19
    assert held >= {d.text for d in documents if d.split(0.05) == "val"}
    again = [Document.from_text(str(number), "") for number in reversed(range(4000))]
    assert held == {d.text for d in again if d.split(0.1) == "val"}


@pytest.mark.parametrize(
    ("number", "val_fraction"), [(1, 0.1), (5, 0.1), (40, 1e-9), (40, 1 - 1e-9)]
)
def test_few_documents_hold_out_their_ends(number: int, val_fraction: float) -> None:
    """Few, or hashes that would leave a split empty; together the parts are the documents."""
    texts = [f"{i} start\n" + "word\n" * 50 for i in range(number)]
    documents = [Document.from_text(text, f"{i}.txt") for i, text in enumerate(texts)]
    assert needs_cuts(documents, val_fraction)
    parts = [part for each in documents for part in split_document(each, val_fraction, cuts=True)]
    assert [name for _, name in parts] == ["train", "val"] * number
    for text, (start, _), (end, _) in zip(texts, parts[::2], parts[1::2], strict=True):
        assert start.text + end.text == text
        assert end.where == f"the end of {start.where}"


def test_needs_cuts_reads_few_documents_beforehand() -> None:
    read = []

    def numbers() -> Iterator[Document]:
        for number in range(100_000):
            read.append(number)
            yield Document.from_text(str(number), "")

    assert not needs_cuts(numbers(), 0.1)
    assert len(read) < 100


def test_installed_source_reads_all_distributions_but_this(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a folder of packages: their .py files, versions and licences; of this project nothing."""
    texts = {"alpha": "a = 1\n", "beta": "\ufeffb = 2\n", "lightning_sv": "c = 3\n"}
    for name, text in texts.items():
        module = f"{name}.py"
        (tmp_path / module).write_text(text)
        info = tmp_path / f"{name}-1.5.dist-info"
        info.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\nLicense: MIT\n"
        (info / "METADATA").write_text(metadata)
        (info / "RECORD").write_text(f"{module},,\n{info.name}/METADATA,,\n")
    library = tmp_path / "stdlib"
    library.mkdir()
    (library / "math.py").write_text("d = 4\n")
    (library / "latin.py").write_bytes(b"# \xe9\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(library))
    source = open_source("installed")
    config = CorpusConfig(source="installed")
    documents = read_slices(source.slices, config)
    assert {document.text for document in documents} == {"a = 1\n", "b = 2\n", "d = 4\n"}
    assert source.packages == {"python": platform.python_version(), "alpha": "1.5", "beta": "1.5"}
    assert source.licence == "python: PSF-2.0; alpha: MIT; beta: MIT"
    assert source.left_out == {"not UTF-8": 1}
    (library / "math.py").write_text("e = 5\n")
    with pytest.raises(ConfigError, match=r"math\.py: the file changed"):
        list(read_slices(source.slices, config))
