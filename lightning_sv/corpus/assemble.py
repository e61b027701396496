"""From complete parts to a corpus: enough parts, documents to keep, shards, manifest."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lightning_sv.atomic import remove, replace, write_atomically
from lightning_sv.corpus.config import LAYER, PADDED_TO, CorpusConfig
from lightning_sv.corpus.duplicates import Kept, keep_documents
from lightning_sv.corpus.job import Job
from lightning_sv.corpus.manifest import (
    FILENAME,
    FORMAT_VERSION,
    SPLITS,
    Manifest,
    Shard,
    SplitInfo,
    corpus_hash,
)
from lightning_sv.corpus.parts import NAMED, Part, check_lost
from lightning_sv.corpus.progress import PartsLog, in_threads, phase
from lightning_sv.corpus.shards import Span, plan_shards, write_index, write_shard
from lightning_sv.corpus.validate import check_corpus
from lightning_sv.corpus.work import encode_parts
from lightning_sv.errors import expect

#: log file in the folder of the parts
LOG = "prepare.log"
#: bytes of text per token before any part is encoded; English with GPT-2's tokens has 4.5
_BYTES_PER_TOKEN = 3.0


def encode_enough(job: Job, workers: int, *, shown: bool) -> int:
    """Encode the first parts of a job until they have `max_bytes` or `max_tokens`; return their number."""
    count = 0
    while count < len(job.parts):
        count = _enough(job, count)
        parts = job.parts[:count]
        _encode(job, count, workers, shown=shown)
        if count < len(job.parts) and _keep(job, parts).is_limited:
            break
    return count


def _encode(job: Job, count: int, workers: int, *, shown: bool) -> None:
    report = PartsLog(job.folder / LOG, job.parts[:count], job.tokenizer.dtype.itemsize)
    with phase("encoding", report.total_bytes, shown=shown) as advance:

        def step(n_bytes: int) -> None:
            advance(n_bytes)
            report.update()

        advance(report.done_bytes)
        encode_parts(job, count, workers, step)
    if job.is_open():
        report.update(is_last=True)


def _enough(job: Job, count: int) -> int:
    """Return a number of parts, above `count`, that is estimated to reach the limit of the corpus."""
    config = job.config
    encoded = [part.summary() for part in job.parts[:count]]
    n_bytes = sum(summary["bytes"] for summary in encoded)
    ratio = (
        n_bytes / max(1, sum(summary["tokens"] for summary in encoded))
        if encoded
        else _BYTES_PER_TOKEN
    )
    needed = float("inf")
    if config.limit is not None:
        needed = config.limit
    if config.max_tokens is not None:
        needed = min(needed, ratio * config.max_tokens)

    planned = 0
    for number, part in enumerate(job.parts, 1):
        planned += part.n_bytes
        if number > count and planned >= needed:
            return number
    return len(job.parts)


def _keep(job: Job, parts: list[Part]) -> Kept:
    return keep_documents(parts, max_bytes=job.config.limit, max_tokens=job.config.max_tokens)


def publish(job: Job, count: int, target: Path, workers: int, *, shown: bool) -> Manifest:
    """Write the corpus of the first `count` parts and rename it to `target`; remove the parts unless it can grow."""
    parts = job.parts[:count]
    kept = _keep(job, parts)
    _check_max_tokens(job, parts, kept)
    folder = job.folder / "corpus"
    splits = _write_splits(job, parts, kept, folder, workers, shown=shown)
    manifest = _manifest(job, parts, kept, splits)
    job.tokenizer.save(folder)
    _write_layer(job.config, job.tokenizer.vocab_size, folder)
    write_atomically(folder / FILENAME, json.dumps(manifest.to_dict(), indent=2, sort_keys=True))
    replace(folder, target)
    if job.config.max_tokens is None:
        remove(job.folder)
    check_corpus(
        manifest, target
    )  # now, because other users may not be able to write verified.json
    # The library's threads do not survive a fork, about which it would warn in every process forked
    # later.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return manifest


def _check_max_tokens(job: Job, parts: list[Part], kept: Kept) -> None:
    limit = job.config.max_tokens
    if limit is None or kept.is_limited:
        return
    total = sum(_n_tokens(parts, kept, split) for split in SPLITS)
    expect(
        total == limit,
        "max_tokens",
        f"{limit:,}",
        f"at most {total:,}, all tokens of {job.config.source}.",
    )


def _n_tokens(parts: list[Part], kept: Kept, split: str) -> int:
    pairs = zip(parts, kept.rows, strict=True)
    return sum(int(_tokens(part, split, rows).sum()) for part, rows in pairs)


def _tokens(part: Part, split: str, rows: np.ndarray) -> np.ndarray:
    """Return the number of tokens of each document of a part in a split (n,), 0 for one that is dropped."""
    return part.documents()[f"{split}_tokens"] * rows.astype(np.int64)


def _write_splits(
    job: Job, parts: list[Part], kept: Kept, folder: Path, workers: int, *, shown: bool
) -> dict[str, SplitInfo]:
    writers = {split: _SplitWriter(job, parts, kept, split, folder) for split in SPLITS}
    tasks: list[Callable[[], int]] = []
    for writer in writers.values():
        tasks += [partial(writer.write, number) for number in range(len(writer.plan))]
    total = job.tokenizer.dtype.itemsize * sum(_n_tokens(parts, kept, split) for split in SPLITS)
    in_threads("writing shards", lambda task: task(), tasks, total, shown=shown, threads=workers)
    return {split: writer.finish() for split, writer in writers.items()}


class _SplitWriter:
    """Writer of the shards of one split; a shard that an interrupted preparation completed is kept."""

    def __init__(self, job: Job, parts: list[Part], kept: Kept, split: str, folder: Path) -> None:
        self.job = job
        self.parts = parts
        self.kept = kept
        self.split = split
        self.folder = folder / split
        self.folder.mkdir(parents=True, exist_ok=True)
        self.dtype = job.tokenizer.dtype
        tokens = (_tokens(part, split, rows) for part, rows in zip(parts, kept.rows, strict=True))
        self.plan = plan_shards(
            (sizes * self.dtype.itemsize for sizes in tokens), job.config.chunk_size
        )

    def write(self, number: int) -> int:
        """Write a shard, unless it exists; return its bytes."""
        described = self._description(number)
        key = self._key(number)
        if described.is_file():
            content = json.loads(described.read_text())
            if content["key"] == key:
                return int(content["bytes"])
            described.unlink()
        spans = self.plan[number]
        sizes = [self._sizes(span) * self.dtype.itemsize for span in spans]
        path = self.folder / f"chunk-0-{number}.bin"
        content = write_shard(path, sizes, map(self._span_tokens, spans))
        write_atomically(described, json.dumps(content | {"key": key}))
        return int(content["bytes"])

    def _description(self, number: int) -> Path:
        """Return the file that describes a complete shard until the corpus is published."""
        return self.folder / f"chunk-0-{number}.json"

    def _key(self, number: int) -> str:
        """Return a hash of the documents of a shard."""
        digest = hashlib.sha256()
        for span in self.plan[number]:
            digest.update(f"{self.parts[span.part].path.name} {span.start} {span.stop}".encode())
            digest.update(self._rows(span).tobytes())
        return digest.hexdigest()

    def _rows(self, span: Span) -> np.ndarray:
        return self.kept.rows[span.part][span.start : span.stop]

    def _sizes(self, span: Span) -> np.ndarray:
        """Return the tokens of each document of a span that is in the split and kept."""
        sizes = _tokens(self.parts[span.part], self.split, self.kept.rows[span.part])[
            span.start : span.stop
        ]
        return sizes[sizes > 0]

    def _span_tokens(self, span: Span) -> np.ndarray:
        """Return the tokens of the documents of a span that are kept."""
        part = self.parts[span.part]
        lengths = part.documents()[f"{self.split}_tokens"].astype(np.int64)
        first = int(lengths[: span.start].sum())
        lengths = lengths[span.start : span.stop]
        tokens = part.tokens(self.split, self.dtype)[first : first + int(lengths.sum())]
        rows = self._rows(span)
        return tokens if rows.all() else tokens[np.repeat(rows, lengths)]

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
        write_index(self.folder, shards, self.job.config.chunk_size, self.dtype)
        documents = sum(shard.documents for shard in shards)
        tokens = sum(shard.tokens for shard in shards)
        n_bytes = _text_bytes(self.parts, self.kept, self.split)
        return SplitInfo(documents, tokens, n_bytes, largest, tuple(shards))


def _text_bytes(parts: list[Part], kept: Kept, split: str) -> int:
    """Return the bytes of the text of a split; of validation text those that the tokenizer keeps."""
    total = 0
    for part, rows in zip(parts, kept.rows, strict=True):
        table = part.documents()[rows]
        n_bytes = table["val_bytes"].astype(np.int64)
        if split == "train":
            n_bytes = table["n_bytes"] - n_bytes - table["lost_bytes"]
        total += int(n_bytes.sum())
    return total


def _manifest(job: Job, parts: list[Part], kept: Kept, splits: dict[str, SplitInfo]) -> Manifest:
    config = job.config
    source = job.source
    tokenizer = job.tokenizer
    summaries = [part.summary() for part in parts]
    lost = sum(
        int(part.documents()["lost_bytes"][rows].sum())
        for part, rows in zip(parts, kept.rows, strict=True)
    )
    val_bytes = splits["val"].bytes + lost
    check_lost(lost, val_bytes, config.tokenizer)
    return Manifest(
        version=FORMAT_VERSION,
        source=config.source,
        licence=config.licence or source.licence,
        packages=source.packages,
        settings=config.settings(),
        tokenizer=config.tokenizer,
        tokenizer_file=tokenizer.filename,
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        eot=tokenizer.eot,
        dtype=tokenizer.dtype.name,
        splits=splits,
        duplicates=kept.duplicates,
        unreadable=source.unreadable
        + len(set().union(*(summary["unreadable"] for summary in summaries))),
        corpus_hash=corpus_hash(tokenizer.sha256, splits),
        sources=source.files,
        left_out=source.left_out,
        held_out=list(_held_out(parts, summaries, kept)),
        tokenizer_loss=lost / val_bytes,
    )


def _held_out(parts: list[Part], summaries: list[dict[str, Any]], kept: Kept) -> Iterator[str]:
    """Yield the names of the first validation documents."""
    left = NAMED
    for part, summary, rows in zip(parts, summaries, kept.rows, strict=True):
        in_part = int((part.documents()["val_tokens"][rows] > 0).sum())
        names = summary["held_out"][: min(left, in_part)]
        yield from names
        left -= len(names)


def _write_layer(config: CorpusConfig, vocab_size: int, folder: Path) -> None:
    """Write the settings that reproduce this corpus and the model's vocabulary size, as a layer of a run's config."""
    always = ("dir", "source", "tokenizer")
    default = asdict(CorpusConfig())
    settings = {
        key: value
        for key, value in asdict(config).items()
        if key in always or value != default[key]
    }
    padded = -(-vocab_size // PADDED_TO) * PADDED_TO
    layer: dict[str, Any] = {
        "data": {"corpus": settings},
        "model": {"backbone": {"vocab_size": padded}},
    }
    from omegaconf import OmegaConf  # imported here, because training does not need it

    OmegaConf.save(OmegaConf.create(layer), folder / LAYER)
