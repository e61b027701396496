"""From complete parts to a corpus: shards, indexes and manifest, published as one folder."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from lightning_sv.atomic import remove, replace, write_atomically
from lightning_sv.corpus.config import LAYER, PADDED_TO, CorpusConfig
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
from lightning_sv.corpus.parts import grouped
from lightning_sv.corpus.progress import phase
from lightning_sv.corpus.selection import Selection
from lightning_sv.corpus.shards import index_of, write_shard
from lightning_sv.corpus.validate import check_corpus
from lightning_sv.errors import expect


def publish(job: Job, selection: Selection, target: Path, *, shown: bool) -> Manifest:
    """Write the corpus of the selected documents, rename it to `target`, and remove the parts."""
    folder = job.folder / "corpus"
    remove(folder)  # of a start that was interrupted
    splits = _write_splits(job, selection, folder, shown=shown)
    manifest = _manifest(job, selection, splits)
    job.tokenizer.save(folder)
    _write_layer(job.config, job.tokenizer.vocab_size, folder)
    write_atomically(folder / FILENAME, json.dumps(manifest.to_dict(), indent=2, sort_keys=True))
    replace(folder, target)
    manifest = Manifest.load(target)  # with its checksum
    remove(job.folder)
    check_corpus(manifest, target)  # now, because other users may not write verified.json
    # The library's threads do not survive a fork, about which it would warn in every process forked
    # later.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return manifest


def _write_splits(
    job: Job, selection: Selection, folder: Path, *, shown: bool
) -> dict[str, SplitInfo]:
    n_tokens = 0
    for split in SPLITS:
        of_split = selection.total(f"{split}_tokens")
        expected = f"more, because no document of the split {split} is within them."
        expect(of_split > 0, "max_tokens", job.config.max_tokens, expected)
        n_tokens += of_split

    n_bytes = job.tokenizer.dtype.itemsize * n_tokens
    with phase("writing shards", n_bytes, shown=shown) as advance:
        return {split: _write_split(job, selection, split, folder, advance) for split in SPLITS}


def _write_split(
    job: Job, selection: Selection, split: str, folder: Path, advance: Callable[[int], None]
) -> SplitInfo:
    """Write the shards of a split and their index; call `advance` with the bytes of each."""
    dtype = job.tokenizer.dtype
    chunk_bytes = job.config.chunk_size
    documents = selection.tokens(split, dtype)
    shards: list[Shard] = []
    for chunk in grouped(documents, lambda tokens: tokens.nbytes, chunk_bytes):
        name = f"{split}/chunk-0-{len(shards)}.bin"
        shard = write_shard(folder, name, chunk)
        shards.append(shard)
        advance(shard.bytes)

    index = index_of(shards, chunk_bytes, dtype.name)
    (folder / split / "index.json").write_text(json.dumps(index, sort_keys=True))
    return SplitInfo(
        documents=sum(shard.documents for shard in shards),
        tokens=sum(shard.tokens for shard in shards),
        bytes=selection.total(f"{split}_bytes"),
        shards=tuple(shards),
    )


def _manifest(job: Job, selection: Selection, splits: dict[str, SplitInfo]) -> Manifest:
    config = job.config
    source = job.source
    tokenizer = job.tokenizer
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
        duplicates=selection.duplicates,
        corpus_hash=corpus_hash(tokenizer.sha256, splits),
        sources=source.files,
        left_out=source.left_out,
    )


def _write_layer(config: CorpusConfig, vocab_size: int, folder: Path) -> None:
    """Write the corpus's own layer of a run's config.

    It has the settings that reproduce the corpus, and the vocabulary size of a model.
    """
    padded = -(-vocab_size // PADDED_TO) * PADDED_TO
    layer: dict[str, Any] = {
        "data": {"corpus": asdict(config)},
        "model": {"backbone": {"vocab_size": padded}},
    }
    (folder / LAYER).write_text(yaml.safe_dump(layer, allow_unicode=True, sort_keys=False))
