"""Token shards in litdata's format: documents in order, cut into files, with an index."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_sv.atomic import atomic_path
from lightning_sv.corpus.manifest import Shard
from lightning_sv.errors import expect

# litdata's names of 1-D NumPy arrays of these types. Other formats are rejected: some are pickles.
_DATA_FORMATS = {"uint16": ["no_header_numpy:5"], "uint32": ["no_header_numpy:6"]}
# Settings of litdata's index of uncompressed shards, one 1-D NumPy array per document.
_INDEX = {
    "chunk_size": None,
    "compression": None,
    "compression_batch_size": None,
    "compression_level": None,
    "data_spec": '[1, {"type": null, "context": null, "children_spec": []}]',
    "encryption": None,
    "ipc_compression": None,
    "item_loader": "TokensLoader",
    "types": "json",
}


def write_shard(folder: Path, name: str, documents: Sequence[np.ndarray]) -> Shard:
    """Write the tokens of some documents in litdata's format.

    The format is the number of documents, their offsets and the end (uint32), and the tokens.

    Args:
        folder: folder of the corpus
        name: name of the shard in it
        documents: tokens of each document (n,)
    """
    sizes = [document.nbytes for document in documents]
    offsets = np.cumsum([header_bytes(len(documents)), *sizes])
    n_bytes = int(offsets[-1])
    expect(
        n_bytes < 1 << 32, "chunk_bytes", f"{n_bytes:,} bytes in one document", "less than 4 GiB."
    )
    header = np.array([len(documents), *offsets], np.uint32)
    tokens = np.concatenate(documents)
    with atomic_path(folder / name) as partial, partial.open("wb") as file:
        file.write(header.data)
        file.write(tokens.data)
    digest = hashlib.sha256(header.data)
    digest.update(tokens.data)
    return Shard(name, n_bytes, digest.hexdigest(), len(documents), len(tokens))


def index_of(shards: Sequence[Shard], chunk_bytes: int, dtype: str) -> dict[str, Any]:
    """Return the content of litdata's index of some shards."""
    chunks = [
        {
            "chunk_bytes": shard.bytes,
            "chunk_size": shard.documents,
            "dim": shard.tokens,
            "filename": Path(shard.file).name,
        }
        for shard in shards
    ]
    config = _INDEX | {"chunk_bytes": chunk_bytes, "data_format": _DATA_FORMATS.get(dtype)}
    return {"chunks": chunks, "config": config}


def header_bytes(documents: int) -> int:
    """Return the bytes before the tokens: number of documents, offsets and the end, in uint32."""
    return 4 * (documents + 2)
