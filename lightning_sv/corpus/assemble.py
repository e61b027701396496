"""From complete parts to a corpus: enough parts, documents to keep, shards, manifest."""

import hashlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict
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
    """Encode the first parts of a job until they have `max_bytes` or `max_tokens`.

    Returns:
        their number
    """
    count = 0
    while count < len(job.parts):
        count = _enough(job, count)
        _encode(job, count, workers, shown=shown)
        if count < len(job.parts) and _keep(job, job.parts[:count]).is_limited:
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
    """Return a number of parts, above `count`, that should reach the limit of the corpus."""
    needed = math.inf
    if job.config.limit is not None:
        needed = job.config.limit
    if job.config.max_tokens is not None:
        needed = min(needed, _bytes_per_token(job.parts[:count]) * job.config.max_tokens)

    planned = 0
    for number, part in enumerate(job.parts, 1):
        planned += part.n_bytes
        if number > count and planned >= needed:
            return number
    return len(job.parts)


def _bytes_per_token(encoded: list[Part]) -> float:
    if not encoded:
        return _BYTES_PER_TOKEN
    n_bytes = 0
    n_tokens = 0
    for part in encoded:
        summary = part.summary()
        n_bytes += summary["bytes"]
        n_tokens += summary["tokens"]
    return n_bytes / max(1, n_tokens)


def _keep(job: Job, parts: list[Part]) -> Kept:
    return keep_documents(parts, max_bytes=job.config.limit, max_tokens=job.config.max_tokens)


def publish(job: Job, count: int, target: Path, workers: int, *, shown: bool) -> Manifest:
    """Write the corpus of the first `count` parts and rename it to `target`.

    The parts are removed, unless the corpus can grow.
    """
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
    check_corpus(manifest, target)  # now, because other users may not write verified.json
    # The library's threads do not survive a fork, about which it would warn in every process forked
    # later.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return manifest


def _check_max_tokens(job: Job, parts: list[Part], kept: Kept) -> None:
    limit = job.config.max_tokens
    if limit is None or kept.is_limited:
        return
    total = _n_tokens(parts, kept)
    expected = f"at most {total:,}, all tokens of {job.config.source}."
    expect(total == limit, "max_tokens", f"{limit:,}", expected)


def _n_tokens(parts: list[Part], kept: Kept) -> int:
    """Return the tokens of both splits."""
    total = 0
    for part, rows in zip(parts, kept.rows, strict=True):
        for split in SPLITS:
            total += int(_tokens(part, split, rows).sum())
    return total


def _tokens(part: Part, split: str, rows: np.ndarray) -> np.ndarray:
    """Return the tokens of each document of a part in a split (n,), 0 if it is dropped."""
    return part.documents()[f"{split}_tokens"] * rows.astype(np.int64)


def _write_splits(
    job: Job, parts: list[Part], kept: Kept, folder: Path, workers: int, *, shown: bool
) -> dict[str, SplitInfo]:
    writers = {split: _SplitWriter(job, parts, kept, split, folder) for split in SPLITS}
    shards: list[tuple[str, int]] = []
    for split, writer in writers.items():
        for number in range(len(writer.plan)):
            shards.append((split, number))

    def write(shard: tuple[str, int]) -> int:
        split, number = shard
        return writers[split].write(number)

    total = job.tokenizer.dtype.itemsize * _n_tokens(parts, kept)
    in_threads("writing shards", write, shards, total, shown=shown, threads=workers)
    return {split: writer.finish() for split, writer in writers.items()}


class _SplitWriter:
    """Writer of the shards of one split.

    A shard that an interrupted preparation completed is kept.
    """

    def __init__(self, job: Job, parts: list[Part], kept: Kept, split: str, folder: Path) -> None:
        self.job = job
        self.parts = parts
        self.kept = kept
        self.split = split
        self.folder = folder / split
        self.folder.mkdir(parents=True, exist_ok=True)
        self.dtype = job.tokenizer.dtype
        self.plan = plan_shards(self._sizes_of_parts(), job.config.chunk_size)

    def _sizes_of_parts(self) -> Iterator[np.ndarray]:
        """Yield the bytes of the tokens of a part's documents, 0 for those that are dropped."""
        for part, rows in zip(self.parts, self.kept.rows, strict=True):
            yield _tokens(part, self.split, rows) * self.dtype.itemsize

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
        sizes = [self._sizes(span) for span in spans]
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
        """Return the bytes of the tokens of each document of a span that is in the split."""
        tokens = _tokens(self.parts[span.part], self.split, self.kept.rows[span.part])
        in_span = tokens[span.start : span.stop]
        return in_span[in_span > 0] * self.dtype.itemsize

    def _span_tokens(self, span: Span) -> np.ndarray:
        """Return the tokens of the documents of a span that are kept."""
        part = self.parts[span.part]
        lengths = part.documents()[f"{self.split}_tokens"].astype(np.int64)
        first = int(lengths[: span.start].sum())
        lengths = lengths[span.start : span.stop]
        tokens = part.tokens(self.split, self.dtype)[first : first + int(lengths.sum())]
        rows = self._rows(span)
        if rows.all():
            return tokens
        return tokens[np.repeat(rows, lengths)]

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
    """Return the bytes of the text of a split; of validation text what the tokenizer keeps."""
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
    unreadable: set[str] = set()
    lost = 0
    for part, rows in zip(parts, kept.rows, strict=True):
        unreadable.update(part.summary()["unreadable"])
        lost += int(part.documents()["lost_bytes"][rows].sum())
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
        unreadable=source.unreadable + len(unreadable),
        corpus_hash=corpus_hash(tokenizer.sha256, splits),
        sources=source.files,
        left_out=source.left_out,
        held_out=_held_out(parts, kept),
        tokenizer_loss=lost / val_bytes,
    )


def _held_out(parts: list[Part], kept: Kept) -> list[str]:
    """Return the names of the first validation documents."""
    names: list[str] = []
    for part, rows in zip(parts, kept.rows, strict=True):
        in_part = int((part.documents()["val_tokens"][rows] > 0).sum())
        names += part.summary()["held_out"][:in_part]
        if len(names) >= NAMED:
            break
    return names[:NAMED]


def _write_layer(config: CorpusConfig, vocab_size: int, folder: Path) -> None:
    """Write the corpus's own layer of a run's config.

    It has the settings that reproduce the corpus, and the vocabulary size of a model.
    """
    always = ("dir", "source", "tokenizer")
    default = asdict(CorpusConfig())
    settings = {}
    for key, value in asdict(config).items():
        if key in always or value != default[key]:
            settings[key] = value
    padded = -(-vocab_size // PADDED_TO) * PADDED_TO
    layer: dict[str, Any] = {
        "data": {"corpus": settings},
        "model": {"backbone": {"vocab_size": padded}},
    }
    from omegaconf import OmegaConf  # imported here, because training does not need it

    OmegaConf.save(OmegaConf.create(layer), folder / LAYER)
