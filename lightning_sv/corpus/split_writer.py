"""Writer of the shards of one split, from the parts of a preparation."""

import hashlib
import json
from pathlib import Path

import numpy as np

from lightning_sv.atomic import write_atomically
from lightning_sv.corpus.job import Job
from lightning_sv.corpus.manifest import Shard, SplitInfo
from lightning_sv.corpus.selection import Selection
from lightning_sv.corpus.shards import Span, plan_shards, write_index, write_shard


class SplitWriter:
    """Writer of the shards of one split.

    A shard that an interrupted preparation completed is kept: a file next to it has its
    description, with a hash of its documents.
    """

    def __init__(self, job: Job, selection: Selection, split: str, folder: Path) -> None:
        self.selection = selection
        self.split = split
        self.folder = folder / split
        self.folder.mkdir(parents=True, exist_ok=True)
        self.dtype = job.tokenizer.dtype
        self.chunk_bytes = job.config.chunk_size
        sizes = (part.lengths(split) * self.dtype.itemsize for part in selection.parts)
        self.plan = plan_shards(sizes, self.chunk_bytes)

    def write(self, number: int) -> int:
        """Write a shard, unless it exists; return its bytes."""
        description = self._description(number)
        key = self._key(number)
        if description.is_file():
            content = json.loads(description.read_text())
            if content["key"] == key:
                return int(content["bytes"])
            # Before the shard is replaced: if the process is killed then, the new shard would have
            # the description of the old one.
            description.unlink()
        spans = self.plan[number]
        sizes = [self._sizes(span) for span in spans]
        path = self.folder / f"chunk-0-{number}.bin"
        content = write_shard(path, sizes, map(self._span_tokens, spans))
        write_atomically(description, json.dumps(content | {"key": key}))
        return int(content["bytes"])

    def _description(self, number: int) -> Path:
        """Return the file next to a shard that describes it; it is written last."""
        return self.folder / f"chunk-0-{number}.json"

    def _key(self, number: int) -> str:
        """Return a hash of the documents of a shard."""
        digest = hashlib.sha256()
        for span in self.plan[number]:
            kept = self.selection.parts[span.part]
            digest.update(f"{kept.part.path.name} {span.start} {span.stop}".encode())
            digest.update(kept.rows[span.start : span.stop].tobytes())
        return digest.hexdigest()

    def _sizes(self, span: Span) -> np.ndarray:
        """Return the bytes of the tokens of each document of a span that is in the split."""
        lengths = self.selection.parts[span.part].lengths(self.split)[span.start : span.stop]
        in_split = lengths > 0
        return lengths[in_split] * self.dtype.itemsize

    def _span_tokens(self, span: Span) -> np.ndarray:
        """Return the tokens of the documents of a span that are kept."""
        kept = self.selection.parts[span.part]
        part_lengths = kept.part.documents()[f"{self.split}_tokens"].astype(np.int64)
        span_lengths = part_lengths[span.start : span.stop]
        first = int(part_lengths[: span.start].sum())
        stop = first + int(span_lengths.sum())
        tokens = kept.part.tokens(self.split, self.dtype)[first:stop]
        is_kept = kept.rows[span.start : span.stop]
        if is_kept.all():
            return tokens
        return tokens[np.repeat(is_kept, span_lengths)]

    def finish(self) -> SplitInfo:
        """Write the index, remove all other files, and return the split's description."""
        shards: list[Shard] = []
        largest = 0
        for number in range(len(self.plan)):
            content = json.loads(self._description(number).read_text())
            largest = max(largest, content.pop("largest_token"))
            del content["key"]
            shards.append(Shard(file=f"{self.split}/chunk-0-{number}.bin", **content))
        names = {Path(shard.file).name for shard in shards}
        for path in self.folder.iterdir():
            if path.name not in names:
                path.unlink()
        write_index(self.folder, shards, self.chunk_bytes, self.dtype)
        documents = sum(shard.documents for shard in shards)
        tokens = sum(shard.tokens for shard in shards)
        n_bytes = self.selection.text_bytes(self.split)
        return SplitInfo(documents, tokens, n_bytes, largest, tuple(shards))
