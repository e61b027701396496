"""Parts of a corpus: consecutive slices of its source, encoded on their own.

A part is a folder that appears complete or not at all. It can be written by any process, in any
order:

    00003-5d1c0e7a9b42/
      part.json        size, tokens, text bytes, slices; places of text that is not UTF-8
      documents.npy    one `DOCUMENT` of 36 bytes per document, duplicates included
      train.bin        tokens of the training documents in order, each with its end-of-text token
      val.bin          the same of the validation documents

The folder's name has the part's number and a hash of all that determines its content, so that a
part of a different text, tokenizer or revision is never taken for this one.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from lightning_sv.atomic import atomic_path
from lightning_sv.corpus.config import CorpusConfig
from lightning_sv.corpus.manifest import SPLITS
from lightning_sv.corpus.sources.document import Document, Reader, Slice, Source, split_document
from lightning_sv.corpus.tokenizer import Tokenizer
from lightning_sv.errors import ConfigError

#: default size of a part in bytes of text: seconds of work, which a killed process loses
PART_BYTES = 128 << 20
#: version of a part's files
PART_VERSION = 1
#: A document: half of its hash, its bytes, and its tokens and bytes in the splits; tokens are 0 in
#: a duplicate.
DOCUMENT = np.dtype(
    [
        ("digest", "<u8", 2), ("n_bytes", "<u4"), ("train_tokens", "<u4"), ("val_tokens", "<u4"),
        ("val_bytes", "<u4"), ("lost_bytes", "<u4"),
    ]
)  # fmt: skip
#: maximum fraction of the text that a tokenizer may drop, checked from this number of bytes of
#: validation text on
MOST_LOST = 0.05
LOSS_SAMPLE_BYTES = 1_000_000
# Text that is encoded at once.
_BATCH_BYTES = 1 << 22
#: numpy parses a header with `ast`, which fails in two threads at once: "AST constructor recursion
#: depth mismatch" in CPython 3.11 (its issue 106905)
_HEADERS = Lock()


@dataclass(frozen=True)
class Encoding:
    """All that determines the tokens of a document, in addition to its text.

    Args:
        config: settings of the corpus
        tokenizer: tokenizer of the corpus
        cuts: if True, each document is cut, with its end in validation
    """

    config: CorpusConfig
    tokenizer: Tokenizer
    cuts: bool

    def key(self) -> list[Any]:
        """Return the values that distinguish parts."""
        token = [self.tokenizer.sha256, self.tokenizer.eot]
        config = self.config
        settings = [config.val_fraction, self.cuts, config.errors, config.text_field]
        return [PART_VERSION, *token, *settings]


@dataclass(frozen=True)
class Part:
    """A part to encode, or that is encoded.

    Attributes:
        path: its folder
        slices: consecutive slices of the source
        max_bytes: for the first part, stop before the document that would exceed this many bytes;
            None for no limit
    """

    path: Path
    slices: tuple[Slice, ...]
    max_bytes: int | None

    @property
    def n_bytes(self) -> int:
        """Bytes of the slices: those of files, or of the text's column in Parquet."""
        return sum(piece.n_bytes for piece in self.slices)

    def is_complete(self) -> bool:
        """Return True if the part is encoded."""
        return (self.path / "part.json").is_file()

    def summary(self) -> dict[str, Any]:
        """Return the content of part.json of a complete part."""
        summary: dict[str, Any] = json.loads((self.path / "part.json").read_text())
        return summary

    def documents(self) -> np.ndarray:
        """Return the documents of a complete part, mapped from the disk."""
        with _HEADERS:
            return np.load(self.path / "documents.npy", mmap_mode="r")

    def tokens(self, split: str, dtype: np.dtype) -> np.ndarray:
        """Return the tokens of a split of a complete part, mapped from the disk."""
        path = self.path / f"{split}.bin"
        if not path.stat().st_size:  # which cannot be mapped
            return np.empty(0, dtype)
        return np.memmap(path, dtype, mode="r")


def plan_parts(
    folder: Path, slices: list[Slice], encoding: Encoding, max_bytes: int | None, part_bytes: int
) -> list[Part]:
    """Group consecutive slices into parts of about `part_bytes` of text."""
    groups: list[list[Slice]] = [[]]
    n_bytes = 0
    for piece in slices:
        if groups[-1] and n_bytes + piece.n_bytes > part_bytes:
            groups.append([])
            n_bytes = 0
        groups[-1].append(piece)
        n_bytes += piece.n_bytes

    parts = []
    for number, group in enumerate(groups):
        limit = None if number else max_bytes
        content = [*encoding.key(), limit, [asdict(piece) for piece in group]]
        key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]
        parts.append(Part(folder / f"{number:05}-{key}", tuple(group), limit))
    return parts


@dataclass(slots=True)
class _Row:
    """A row of a part's table, with zeros for a duplicate."""

    digest: bytes
    n_bytes: int
    train_tokens: int = 0
    val_tokens: int = 0
    val_bytes: int = 0
    lost_bytes: int = 0


def encode_part(
    part: Part, source: Source, encoding: Encoding, step: Callable[[int], None] | None = None
) -> None:
    """Encode a part and write its folder.

    Args:
        part: the part
        source: source of its slices
        encoding: settings of the encoding
        step: called with the bytes of text of each batch that is encoded

    Raises:
        ConfigError: the text cannot be read, contains the end-of-text token, or loses too much in
            the tokenizer
    """
    reader = source.reader
    reader.unreadable.clear()
    with atomic_path(part.path) as folder:
        folder.mkdir()
        rows: list[_Row] = []
        with _TokenWriter(folder, encoding) as writer:
            for batch in _batches(_unique(part, reader, rows)):
                writer.write(batch)
                if step is not None:
                    step(sum(row.n_bytes for row, _ in batch))
        source.check_unchanged(part.slices)
        table = _table(rows)
        np.save(folder / "documents.npy", table)
        summary = {
            "documents": len(rows),
            "tokens": int(table["train_tokens"].sum() + table["val_tokens"].sum()),
            "bytes": int(table["n_bytes"].sum()),
            "unreadable": sorted(reader.unreadable),
            "slices": [asdict(piece) for piece in part.slices],
        }
        (folder / "part.json").write_text(json.dumps(summary, indent=1))
        sync(folder)


def _unique(part: Part, reader: Reader, rows: list[_Row]) -> Iterator[tuple[_Row, Document]]:
    """Append a row per document; yield each document of a part once, with its row."""
    seen: set[bytes] = set()
    n_bytes = 0
    for piece in part.slices:
        for document in reader.read(piece):
            row = _Row(document.digest[:16], document.n_bytes)
            rows.append(row)
            if document.digest in seen:
                continue
            n_bytes += document.n_bytes
            if part.max_bytes is not None and n_bytes > part.max_bytes:
                return  # its row marks the end of the corpus
            seen.add(document.digest)
            yield row, document


def _batches(documents: Iterator[tuple[_Row, Document]]) -> Iterator[list[tuple[_Row, Document]]]:
    """Yield lists of documents of about `_BATCH_BYTES`."""
    batch: list[tuple[_Row, Document]] = []
    n_bytes = 0
    for row, document in documents:
        batch.append((row, document))
        n_bytes += row.n_bytes
        if n_bytes >= _BATCH_BYTES:
            yield batch
            batch = []
            n_bytes = 0
    if batch:
        yield batch


def _table(rows: list[_Row]) -> np.ndarray:
    table = np.zeros(len(rows), DOCUMENT)
    digests = b"".join(row.digest for row in rows)
    table["digest"] = np.frombuffer(digests, "<u8").reshape(-1, 2)
    for name in DOCUMENT.names[1:]:  # type: ignore[index]
        table[name] = [getattr(row, name) for row in rows]
    return table


@dataclass(frozen=True, slots=True)
class _Piece:
    """A document, or an end of it, in one split."""

    row: _Row
    document: Document
    is_val: bool


class _TokenWriter:
    """Encode documents and append their tokens to the files of the splits."""

    def __init__(self, folder: Path, encoding: Encoding) -> None:
        self.encoding = encoding
        self._stack = ExitStack()
        self._files = {}
        for name in SPLITS:
            file = (folder / f"{name}.bin").open("wb")
            self._files[name] = self._stack.enter_context(file)
        self._eot = np.array([encoding.tokenizer.eot], encoding.tokenizer.dtype).tobytes()
        self._val_bytes = 0
        self._lost_bytes = 0

    def __enter__(self) -> "_TokenWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def write(self, batch: list[tuple[_Row, Document]]) -> None:
        """Encode a batch of documents, write their tokens, and complete their rows."""
        pieces: list[_Piece] = []
        for row, document in batch:
            pieces += self._pieces(row, document)
        encoded = self.encoding.tokenizer.encode_batch([piece.document.text for piece in pieces])
        for piece, ids in zip(pieces, encoded, strict=True):
            self._check_end(piece.document, ids)
            self._write_piece(piece, ids)
        n_bytes = max(self._val_bytes, LOSS_SAMPLE_BYTES)
        check_lost(self._lost_bytes, n_bytes, self.encoding.config.tokenizer)

    def _pieces(self, row: _Row, document: Document) -> Iterator[_Piece]:
        val_fraction = self.encoding.config.val_fraction
        for part, is_val in split_document(document, val_fraction, cuts=self.encoding.cuts):
            yield _Piece(row, part, is_val)

    def _write_piece(self, piece: _Piece, ids: np.ndarray) -> None:
        content = ids.tobytes() + self._eot
        n_tokens = len(ids) + 1
        if piece.is_val:
            self._files["val"].write(content)
            piece.row.val_tokens = n_tokens
            self._measure_loss(piece.row, piece.document, ids)
        else:
            self._files["train"].write(content)
            piece.row.train_tokens = n_tokens

    def _check_end(self, document: Document, ids: np.ndarray) -> None:
        tokenizer = self.encoding.tokenizer
        if not (ids == tokenizer.eot).any():
            return
        contains = "the text contains"
        if tokenizer.eot == tokenizer.unknown:
            contains = "unknown text is encoded as"
        found = f"{document.where}: {contains} {tokenizer.eot_token!r}, the end-of-text token"
        hint = "remove it, or set data.corpus.eot to a token that is in no text."
        raise ConfigError(f"{found}; {hint}")

    def _measure_loss(self, row: _Row, document: Document, ids: np.ndarray) -> None:
        share = self.encoding.tokenizer.lost_share(document.text, ids.tolist())
        row.lost_bytes = round(document.n_bytes * share)
        row.val_bytes = document.n_bytes - row.lost_bytes
        self._val_bytes += document.n_bytes
        self._lost_bytes += row.lost_bytes


def check_lost(lost_bytes: int, n_bytes: int, tokenizer: str) -> None:
    """Check that a tokenizer drops at most `MOST_LOST` of a text."""
    if lost_bytes > MOST_LOST * n_bytes:
        share = f"{lost_bytes / n_bytes:.0%}"
        hint = "Use one that knows its characters, for example bpe:4096."
        expected = f"at most {MOST_LOST:.0%}. {hint}"
        raise ConfigError(f"tokenizer={tokenizer} drops {share} of this text; expected {expected}")


def sync(folder: Path) -> None:
    """Write the files of a folder to the disk, so that they survive a crash of the machine."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
