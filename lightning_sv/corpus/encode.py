"""Encoding of one part."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from lightning_sv.atomic import atomic_path, sync
from lightning_sv.corpus.job import Job
from lightning_sv.corpus.parts import DOCUMENT, Part, grouped
from lightning_sv.corpus.sources.document import Document
from lightning_sv.corpus.sources.kinds import read_slices
from lightning_sv.corpus.sources.split import split_document
from lightning_sv.errors import ConfigError

# Text that is encoded at once.
_BATCH_BYTES = 1 << 22


def encode_part(job: Job, part: Part) -> Part:
    """Encode a part and write its folder, unless it is complete; return the part.

    Args:
        job: the preparation
        part: one of its parts

    Raises:
        ConfigError: the text cannot be read, or contains the end-of-text token
    """
    if part.is_complete():
        return part
    documents = read_slices(part.slices, job.config)
    tables = [np.empty(0, DOCUMENT)]
    with atomic_path(part.path) as folder:
        folder.mkdir()
        with (folder / "train.bin").open("wb") as train, (folder / "val.bin").open("wb") as val:
            files = {"train": train, "val": val}
            for batch in grouped(documents, lambda document: document.n_bytes, _BATCH_BYTES):
                tables.append(_write_batch(job, batch, files))
        job.source.check_unchanged(part.slices)
        np.save(folder / "documents.npy", np.concatenate(tables))
        sync_files(folder)
    return part


#: a view of a document's row, the document or an end of it, and the split of that
_Piece = tuple[np.void, Document, str]


def _write_batch(job: Job, batch: Sequence[Document], files: Mapping[str, BinaryIO]) -> np.ndarray:
    """Encode documents and append their tokens to the files of the splits; return their rows."""
    table = np.zeros(len(batch), DOCUMENT)
    pieces: list[_Piece] = []
    for row, document in zip(table, batch, strict=True):
        row["digest"] = np.frombuffer(document.digest[:16], "<u8")
        for piece, split in split_document(document, job.config.val_fraction, cuts=job.cuts):
            pieces.append((row, piece, split))

    tokenizer = job.tokenizer
    end = np.array([tokenizer.eot], tokenizer.dtype).tobytes()
    texts = [piece.text for _, piece, _ in pieces]
    encoded = tokenizer.encode_batch(texts)
    for (row, piece, split), ids in zip(pieces, encoded, strict=True):
        if (ids == tokenizer.eot).any():
            found = f"{piece.where}: the text is encoded with {tokenizer.eot_token!r}"
            hint = "set data.corpus.eot to a token that is in no text."
            raise ConfigError(f"{found}, the end-of-text token; {hint}")
        files[split].write(ids.tobytes() + end)
        row[f"{split}_tokens"] = len(ids) + 1
        row[f"{split}_bytes"] = piece.n_bytes
    return table


def sync_files(folder: Path) -> None:
    """Write the files of a folder to the disk, so that they survive a crash of the machine."""
    for path in folder.iterdir():
        sync(path)
    sync(folder)
