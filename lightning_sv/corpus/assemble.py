"""From complete parts to a corpus: shards, indexes and manifest, published as one folder."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_sv.atomic import remove, replace, write_atomically
from lightning_sv.corpus.config import LAYER, PADDED_TO, CorpusConfig
from lightning_sv.corpus.job import Job
from lightning_sv.corpus.manifest import (
    FILENAME,
    FORMAT_VERSION,
    SPLITS,
    Manifest,
    SplitInfo,
    corpus_hash,
)
from lightning_sv.corpus.progress import in_threads
from lightning_sv.corpus.selection import Selection
from lightning_sv.corpus.split_writer import SplitWriter
from lightning_sv.corpus.validate import check_corpus
from lightning_sv.errors import expect


def publish(job: Job, selection: Selection, target: Path, workers: int, *, shown: bool) -> Manifest:
    """Write the corpus of the selected documents and rename it to `target`.

    The parts are removed, unless the corpus can grow.
    """
    _check_max_tokens(job.config, selection)
    folder = job.folder / "corpus"
    remove(folder)  # of a start that was interrupted
    splits = _write_splits(job, selection, folder, workers, shown=shown)
    manifest = _manifest(job, selection, splits)
    job.tokenizer.save(folder)
    _write_layer(job.config, job.tokenizer.vocab_size, folder)
    write_atomically(folder / FILENAME, json.dumps(manifest.to_dict(), indent=2, sort_keys=True))
    replace(folder, target)
    manifest = Manifest.load(target)  # with its checksum
    if job.config.max_tokens is None:
        remove(job.folder)
    check_corpus(manifest, target)  # now, because other users may not write verified.json
    # The library's threads do not survive a fork, about which it would warn in every process forked
    # later.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return manifest


def _check_max_tokens(config: CorpusConfig, selection: Selection) -> None:
    """Check that the text has `max_tokens`, and that both splits have some of them."""
    limit = config.max_tokens
    if limit is None:
        return
    for split in SPLITS:
        has_documents = selection.total(f"{split}_tokens") > 0
        expected = f"more, because no document of the split {split} is within them."
        expect(has_documents, "max_tokens", f"{limit:,}", expected)
    total = selection.n_tokens
    is_reached = selection.is_full or total == limit
    has_both = config.max_bytes is not None and selection.is_limited  # then one limit suffices
    expected = f"at most {total:,}, all tokens of {config.source}."
    expect(is_reached or has_both, "max_tokens", f"{limit:,}", expected)


def _write_splits(
    job: Job, selection: Selection, folder: Path, workers: int, *, shown: bool
) -> dict[str, SplitInfo]:
    writers = {split: SplitWriter(job, selection, split, folder) for split in SPLITS}
    shards: list[tuple[SplitWriter, int]] = []
    for writer in writers.values():
        shards += [(writer, number) for number in range(len(writer.plan))]

    def write(shard: tuple[SplitWriter, int]) -> int:
        writer, number = shard
        return writer.write(number)

    total = job.tokenizer.dtype.itemsize * selection.n_tokens
    in_threads("writing shards", write, shards, total, shown=shown, threads=workers)
    return {split: writer.finish() for split, writer in writers.items()}


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
