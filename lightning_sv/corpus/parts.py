"""Parts of a corpus: consecutive slices of its source, encoded on their own.

A part is a folder that appears complete or not at all. It can be written by any process, in any
order:

    00003-5d1c0e7a9b42/
      part.json        documents, tokens, bytes of text, slices
      documents.npy    one `DOCUMENT` of 32 bytes per document, duplicates included
      train.bin        tokens of the training documents in order, each with its end-of-text token
      val.bin          the same of the validation documents

The folder's name has the part's number and a hash of all that determines its content, so that a
part of a different text, tokenizer or revision is never taken for this one.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

from lightning_sv.atomic import atomic_path
from lightning_sv.corpus.config import CorpusConfig
from lightning_sv.corpus.sources.document import Document, Reader, Slice, Source
from lightning_sv.corpus.sources.split import split_document
from lightning_sv.corpus.tokenizer import Tokenizer
from lightning_sv.errors import ConfigError

#: default size of a part in bytes of text: seconds of work, which a killed process loses
PART_BYTES = 128 << 20
#: version of a part's files
PART_VERSION = 2
#: A document: half of its hash, its bytes, and its tokens and bytes in the splits; tokens are 0 in
#: a duplicate.
DOCUMENT = np.dtype(
    [
        ("digest", "<u8", 2), ("n_bytes", "<u4"), ("train_tokens", "<u4"), ("val_tokens", "<u4"),
        ("val_bytes", "<u4"),
    ]
)  # fmt: skip
# Text that is encoded at once.
_BATCH_BYTES = 1 << 22
_T = TypeVar("_T")


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
        settings = [config.val_fraction, self.cuts, config.text_field]
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
        return np.load(self.path / "documents.npy", mmap_mode="r")

    def tokens(self, split: str, dtype: np.dtype) -> np.ndarray:
        """Return the tokens of a split of a complete part, mapped from the disk."""
        path = self.path / f"{split}.bin"
        if not path.stat().st_size:  # which cannot be mapped
            return np.empty(0, dtype)
        return np.memmap(path, dtype, mode="r")


def grouped(items: Iterable[_T], size_of: Callable[[_T], int], most: int) -> Iterator[list[_T]]:
    """Yield lists of consecutive items of at most this size; a larger item is alone."""
    group: list[_T] = []
    size = 0
    for item in items:
        if group and size + size_of(item) > most:
            yield group
            group = []
            size = 0
        group.append(item)
        size += size_of(item)
    if group:
        yield group


def plan_parts(
    folder: Path,
    slices: Sequence[Slice],
    encoding: Encoding,
    max_bytes: int | None,
    part_bytes: int,
) -> list[Part]:
    """Group consecutive slices into parts of about `part_bytes` of text."""
    groups = grouped(slices, lambda piece: piece.n_bytes, part_bytes)
    parts = []
    for number, group in enumerate(groups):
        limit = None if number else max_bytes
        content = [*encoding.key(), limit, [asdict(piece) for piece in group]]
        key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]
        parts.append(Part(folder / f"{number:05}-{key}", tuple(group), limit))
    return parts


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
        ConfigError: the text cannot be read, or contains the end-of-text token
    """
    with atomic_path(part.path) as folder:
        folder.mkdir()
        documents = _documents(part, source.reader)
        tables = [np.empty(0, DOCUMENT)]
        with (folder / "train.bin").open("wb") as train, (folder / "val.bin").open("wb") as val:
            writer = _TokenWriter(encoding, train, val)
            for batch in grouped(documents, lambda read: read[0].n_bytes, _BATCH_BYTES):
                tables.append(writer.write(batch))
                if step is not None:
                    step(sum(document.n_bytes for document, _ in batch))
        source.check_unchanged(part.slices)

        table = np.concatenate(tables)
        np.save(folder / "documents.npy", table)
        summary = {
            "documents": len(table),
            "tokens": int(table["train_tokens"].sum() + table["val_tokens"].sum()),
            "bytes": int(table["n_bytes"].sum()),
            "slices": [asdict(piece) for piece in part.slices],
        }
        (folder / "part.json").write_text(json.dumps(summary, indent=1))
        sync(folder)


#: a document, and True if it is encoded
_Read = tuple[Document, bool]


def _documents(part: Part, reader: Reader) -> Iterator[_Read]:
    """Yield the documents of a part; the first of each text is encoded.

    The document that would exceed `max_bytes` is the last one, and is not encoded: its row marks
    the end of the corpus.
    """
    limit = math.inf if part.max_bytes is None else part.max_bytes
    n_bytes = 0
    seen: set[bytes] = set()
    for piece in part.slices:
        for document in reader.read(piece):
            if document.digest in seen:
                yield document, False
                continue
            seen.add(document.digest)
            n_bytes += document.n_bytes
            if n_bytes > limit:
                yield document, False
                return
            yield document, True


@dataclass(frozen=True, slots=True)
class _Piece:
    """A document, or an end of it, in one split; `row` is a view of the document's row."""

    row: np.void
    document: Document
    is_val: bool


class _TokenWriter:
    """Encode documents and append their tokens to the files of the splits."""

    def __init__(self, encoding: Encoding, train: BinaryIO, val: BinaryIO) -> None:
        self.encoding = encoding
        self.train = train
        self.val = val
        tokenizer = encoding.tokenizer
        self.end = np.array([tokenizer.eot], tokenizer.dtype).tobytes()

    def write(self, batch: list[_Read]) -> np.ndarray:
        """Encode a batch and write its tokens; return its rows of `DOCUMENT`."""
        table = np.zeros(len(batch), DOCUMENT)
        pieces: list[_Piece] = []
        for row, (document, is_encoded) in zip(table, batch, strict=True):
            row["digest"] = np.frombuffer(document.digest[:16], "<u8")
            row["n_bytes"] = document.n_bytes
            if is_encoded:
                pieces += self._pieces(row, document)

        encoded = self.encoding.tokenizer.encode_batch([piece.document.text for piece in pieces])
        for piece, ids in zip(pieces, encoded, strict=True):
            self._check_end(piece.document, ids)
            self._write_piece(piece, ids)
        return table

    def _pieces(self, row: np.void, document: Document) -> Iterator[_Piece]:
        val_fraction = self.encoding.config.val_fraction
        for part, is_val in split_document(document, val_fraction, cuts=self.encoding.cuts):
            yield _Piece(row, part, is_val)

    def _check_end(self, document: Document, ids: np.ndarray) -> None:
        tokenizer = self.encoding.tokenizer
        if (ids == tokenizer.eot).any():
            found = f"{document.where}: the text is encoded with {tokenizer.eot_token!r}"
            hint = "set data.corpus.eot to a token that is in no text."
            raise ConfigError(f"{found}, the end-of-text token; {hint}")

    def _write_piece(self, piece: _Piece, ids: np.ndarray) -> None:
        content = ids.tobytes() + self.end
        n_tokens = len(ids) + 1
        if piece.is_val:
            self.val.write(content)
            piece.row["val_tokens"] = n_tokens
            piece.row["val_bytes"] = piece.document.n_bytes
        else:
            self.train.write(content)
            piece.row["train_tokens"] = n_tokens


def sync(folder: Path) -> None:
    """Write the files of a folder to the disk, so that they survive a crash of the machine."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
