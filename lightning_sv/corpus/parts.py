"""Parts of a corpus: consecutive slices of its source, encoded on their own.

A part is a folder that appears complete or not at all. It can be written by any process, in any
order:

    00003-5d1c0e7a9b42/
      documents.npy    one `DOCUMENT` of 32 bytes per document, duplicates included
      train.bin        tokens of the training documents in order, each with its end-of-text token
      val.bin          the same of the validation documents

The folder's name has the part's number and a hash of all that determines its content, so that a
part of a different text, tokenizer or revision is never taken for this one.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from lightning_sv.corpus.sources.document import Slice

#: default size of a part in bytes of text: seconds of work, which a killed process loses
PART_BYTES = 128 << 20
#: version of a part's files
PART_VERSION = 3
#: a document: half of its hash, and its tokens and bytes in the splits
DOCUMENT = np.dtype(
    [
        ("digest", "<u8", 2), ("train_tokens", "<u4"), ("val_tokens", "<u4"),
        ("train_bytes", "<u4"), ("val_bytes", "<u4"),
    ]
)  # fmt: skip
_T = TypeVar("_T")


@dataclass(frozen=True)
class Part:
    """A part to encode, or that is encoded.

    Attributes:
        path: its folder
        slices: consecutive slices of the source
    """

    path: Path
    slices: list[Slice]

    @property
    def n_bytes(self) -> int:
        """Bytes of the slices: those of files, or of the text's column in Parquet."""
        return sum(piece.n_bytes for piece in self.slices)

    def is_complete(self) -> bool:
        """Return True if the part is encoded."""
        return self.path.is_dir()

    def documents(self) -> np.ndarray:
        """Return the documents of a complete part, mapped from the disk."""
        return np.load(self.path / "documents.npy", mmap_mode="r")

    def tokens(self, split: str, dtype: np.dtype) -> np.ndarray:
        """Return the tokens of a split of a complete part, mapped from the disk."""
        path = self.path / f"{split}.bin"
        if not path.stat().st_size:  # which cannot be mapped
            return np.empty(0, dtype)
        return np.asarray(np.memmap(path, dtype, mode="r"))  # plain, because its slices are faster


def grouped(items: Iterable[_T], size_of: Callable[[_T], int], most: int) -> Iterator[list[_T]]:
    """Yield lists of consecutive items of at most this size; a larger item is alone."""
    group: list[_T] = []
    size = 0
    for item in items:
        size += size_of(item)
        if group and size > most:
            yield group
            group = []
            size = size_of(item)
        group.append(item)
    if group:
        yield group
