"""Token shards in litdata's format."""

import json
import warnings
from pathlib import Path

import numpy as np

from lightning_sv.atomic import file_sha256
from lightning_sv.corpus.manifest import Shard, SplitInfo


class ShardWriter:
    """Write the documents of one split, one 1-D array of ids each, into shards of at most `chunk_bytes` of tokens.

    `litdata.optimize` starts processes that import the user's script again, and orders chunks by process;
    its underlying writer, `litdata.streaming.Cache`, writes the same files in this process, in order.
    """

    def __init__(self, folder: Path, chunk_bytes: int, dtype: np.dtype) -> None:
        self.folder, self.dtype = folder, dtype
        folder.mkdir(parents=True, exist_ok=True)
        # Imported here, as in shards.py, because litdata imports many cloud clients.
        from litdata.streaming import Cache
        from litdata.streaming.item_loader import TokensLoader

        self._cache = Cache(str(folder), chunk_bytes=chunk_bytes, item_loader=TokensLoader())
        self.documents = self.tokens = self.text_bytes = 0
        self.largest_token = -1

    def add(self, ids: np.ndarray, text_bytes: int) -> None:
        """Append one document, including its end-of-text token, and count its bytes of text."""
        assert ids.dtype == self.dtype and ids.ndim == 1 and ids.size, (ids.dtype, ids.shape)
        with warnings.catch_warnings():
            # A document larger than a shard gets its own shard, which is correct.
            warnings.filterwarnings("ignore", message="An item was larger than the target chunk size")
            self._cache[self.documents] = ids
        self.documents += 1
        self.tokens += ids.size
        self.text_bytes += text_bytes
        self.largest_token = max(self.largest_token, int(ids.max()))

    def finish(self) -> SplitInfo:
        """Close the last shard, write the index, and return the split's description."""
        assert self.documents, "empty splits are rejected earlier"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="An item was larger than the target chunk size")
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
        assert sum(shard.tokens for shard in shards) == self.tokens
        return SplitInfo(self.documents, self.tokens, self.text_bytes, self.largest_token, tuple(shards))
