"""Writing token shards in litdata's format."""

import json
import warnings
from pathlib import Path

import numpy as np

from lightning_sv.atomic import file_sha256
from lightning_sv.corpus.manifest import Shard, SplitInfo


class ShardWriter:
    """Writes the documents of one split, one 1-D array of ids each, into shards of a given size.

    `litdata.optimize` starts processes that import the user's script again, and orders chunks by process; the
    writer beneath it, `litdata.streaming.Cache`, gives the same files from this process, in order.

    Args:
        folder: where the shards go; made if absent
        chunk_bytes: a shard is closed before the document that would bring more bytes of tokens into it
        dtype: of the ids
    """

    def __init__(self, folder: Path, chunk_bytes: int, dtype: np.dtype) -> None:
        self.folder, self.dtype = folder, dtype
        folder.mkdir(parents=True, exist_ok=True)
        # Here, as in shards.py: litdata imports the clients of every cloud.
        from litdata.streaming import Cache
        from litdata.streaming.item_loader import TokensLoader

        self._cache = Cache(str(folder), chunk_bytes=chunk_bytes, item_loader=TokensLoader())
        self.documents = self.tokens = self.text_bytes = 0
        self.largest_token = -1

    def add(self, ids: np.ndarray, text_bytes: int) -> None:
        """Append one document, its end-of-text token included, made from so many bytes of text."""
        assert ids.dtype == self.dtype and ids.ndim == 1 and ids.size, (ids.dtype, ids.shape)
        with warnings.catch_warnings():
            # A document larger than a shard gets a shard of its own: right, and no news for the user.
            warnings.filterwarnings("ignore", message="An item was larger than the target chunk size")
            self._cache[self.documents] = ids
        self.documents += 1
        self.tokens += ids.size
        self.text_bytes += text_bytes
        self.largest_token = max(self.largest_token, int(ids.max()))

    def finish(self) -> SplitInfo:
        """Close the last shard, write the index, and say what was written."""
        assert self.documents, "an empty split is refused before it gets here"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="An item was larger than the target chunk size")
            self._cache.done()
        # Merging is litdata's work between processes, waits for all ranks of a distributed run, and stamps the
        # time; with one writer its result is this file under its final name.
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
