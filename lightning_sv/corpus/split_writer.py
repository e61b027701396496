"""Writer of the shards of one split, from the parts of a preparation."""

from pathlib import Path
from typing import Any

import numpy as np

from lightning_sv.corpus.job import Job
from lightning_sv.corpus.manifest import Shard, SplitInfo
from lightning_sv.corpus.selection import Selection
from lightning_sv.corpus.shards import Span, plan_shards, write_index, write_shard


class SplitWriter:
    """Writer of the shards of one split."""

    def __init__(self, job: Job, selection: Selection, split: str, folder: Path) -> None:
        self.selection = selection
        self.split = split
        self.folder = folder
        self.dtype = job.tokenizer.dtype
        self.chunk_bytes = job.config.chunk_size
        sizes = (part.lengths(split) * self.dtype.itemsize for part in selection.parts)
        self.plan = plan_shards(sizes, self.chunk_bytes)
        self._contents: dict[int, dict[str, Any]] = {}

    def write(self, number: int) -> int:
        """Write a shard; return its bytes."""
        spans = self.plan[number]
        sizes = [self._sizes(span) for span in spans]
        path = self.folder / self._name(number)
        content = write_shard(path, sizes, map(self._span_tokens, spans))
        self._contents[number] = content
        return int(content["bytes"])

    def _name(self, number: int) -> str:
        return f"{self.split}/chunk-0-{number}.bin"

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
        """Write the index of the shards; return the split's description."""
        shards: list[Shard] = []
        largest = 0
        for number in range(len(self.plan)):
            content = self._contents[number]
            largest = max(largest, content.pop("largest_token"))
            shards.append(Shard(file=self._name(number), **content))
        write_index(self.folder / self.split, shards, self.chunk_bytes, self.dtype)
        documents = sum(shard.documents for shard in shards)
        tokens = sum(shard.tokens for shard in shards)
        n_bytes = self.selection.text_bytes(self.split)
        return SplitInfo(documents, tokens, n_bytes, largest, tuple(shards))
