"""Token shards in litdata's format: written, and read as sequences of seq_len + 1 ids."""

import json
import warnings
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_sv.atomic import file_sha256
from lightning_sv.corpus.manifest import SPLITS, Manifest, Shard, SplitInfo
from lightning_sv.corpus.remote import local_folder
from lightning_sv.corpus.validate import check_corpus
from lightning_sv.errors import expect_known

Split = Literal["train", "val"]


class ShardWriter:
    """Write the documents of one split, one 1-D array of ids each, into shards of at most `chunk_bytes` of tokens.

    `litdata.optimize` starts processes that import the user's script again, and orders chunks by process;
    its underlying writer, `litdata.streaming.Cache`, writes the same files in this process, in order.
    """

    def __init__(self, folder: Path, chunk_bytes: int, dtype: np.dtype) -> None:
        self.folder, self.dtype = folder, dtype
        folder.mkdir(parents=True, exist_ok=True)
        # Imported here, because litdata imports many cloud clients.
        from litdata.streaming import Cache
        from litdata.streaming.item_loader import TokensLoader

        self._cache = Cache(str(folder), chunk_bytes=chunk_bytes, item_loader=TokensLoader())
        self.documents = self.text_bytes = 0
        self.largest_token = -1

    def add(self, ids: np.ndarray, text_bytes: int) -> None:
        """Append one document, including its end-of-text token, and count its bytes of text."""
        assert ids.dtype == self.dtype and ids.ndim == 1 and ids.size, (ids.dtype, ids.shape)
        with warnings.catch_warnings(action="ignore"):  # a document larger than a shard gets its own shard
            self._cache[self.documents] = ids
        self.documents += 1
        self.text_bytes += text_bytes
        self.largest_token = max(self.largest_token, int(ids.max()))

    def finish(self) -> SplitInfo:
        """Close the last shard, write the index, and return the split's description."""
        assert self.documents, "empty splits are rejected earlier"
        with warnings.catch_warnings(action="ignore"):  # as in `add`
            self._cache.done()
        # litdata merges the indices of several processes, waits for all ranks and adds a time stamp; with one writer
        # it is enough to rename this file.
        (part,) = self.folder.glob("*.index.json")
        index = json.loads(part.read_text())
        (self.folder / "index.json").write_text(json.dumps(index, sort_keys=True))
        part.unlink()
        shards = [
            Shard(
                file=f"{self.folder.name}/{chunk['filename']}",
                bytes=chunk["chunk_bytes"],
                sha256=file_sha256(self.folder / chunk["filename"]),
                documents=chunk["chunk_size"],
                tokens=chunk["dim"],
            )
            for chunk in index["chunks"]
        ]
        tokens = sum(shard.tokens for shard in shards)
        return SplitInfo(self.documents, tokens, self.text_bytes, self.largest_token, tuple(shards))


def open_split(dir: str | Path, split: Split, *, seq_len: int) -> "Sequences":
    """Open one split of a prepared corpus.

    Args:
        dir: folder of the corpus, or its address in an object store, such as s3://bucket/corpus
        split: 'train' or 'val'
        seq_len: predicted tokens per sequence; items have shape (seq_len + 1,), to be cut into inputs and targets

    Raises:
        ConfigError: the corpus is missing or damaged, or no shard has a sequence of seq_len + 1 tokens
    """
    expect_known("split", split, SPLITS)
    dir = local_folder(dir)
    manifest = Manifest.load(dir)
    # Setup checks the hashes once; sizes are checked here, which is fast.
    check_corpus(manifest, dir, seq_len=seq_len, checksums=False)
    n = manifest.splits[split].sequences(seq_len)
    return Sequences(dir.resolve() / split, seq_len, n, manifest.corpus_hash)


class Sequences(Dataset[Tensor]):
    """Sequences of one split in the order of its shards, int64 of shape (seq_len + 1,); see `open_split`.

    litdata maps the shards in place, without a copy, cache or lock files.
    """

    def __init__(self, folder: Path, seq_len: int, n: int, corpus_hash: str):
        self.seq_len, self.corpus_hash, self._n = seq_len, corpus_hash, n
        from litdata import StreamingDataset
        from litdata.streaming.item_loader import TokensLoader

        loader = TokensLoader(block_size=seq_len + 1)
        self._stream = StreamingDataset(str(folder), item_loader=loader, shuffle=False, drop_last=False)

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, number: int) -> Tensor:
        """Read one sequence; `IndexError` beyond the last."""
        if not 0 <= number < self._n:
            raise IndexError(f"sequence {number} of {self._n}")
        return torch.from_numpy(self._stream[int(number)].astype(np.int64))
