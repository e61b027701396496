"""Preparation of a corpus: read, train the tokenizer, encode, write, count, publish."""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from lightning_sv.atomic import atomic_path, file_sha256, locked
from lightning_sv.corpus.config import LAYER, PADDED_TO, CorpusConfig
from lightning_sv.corpus.manifest import FILENAME, FORMAT_VERSION, SPLITS, Manifest, SplitInfo, corpus_hash
from lightning_sv.corpus.progress import phase
from lightning_sv.corpus.remote import is_remote
from lightning_sv.corpus.shards import ShardWriter
from lightning_sv.corpus.sources.document import Document, Source, SplitDocuments
from lightning_sv.corpus.sources.files import changed_text, file_states, files_source
from lightning_sv.corpus.sources.hub import hub_source
from lightning_sv.corpus.sources.stdlib import python_source
from lightning_sv.corpus.tokenizer import END_OF_TEXT, Tokenizer, bpe_size, open_tokenizer, tokenizer_file
from lightning_sv.corpus.validate import check_corpus
from lightning_sv.errors import ConfigError, expect

#: kind of a source -> function that returns its documents; `CorpusConfig` checks the kind
SOURCES: dict[str, Callable[[CorpusConfig], Source]] = {
    "stdlib": python_source, "installed": python_source, "files": files_source, "hf": hub_source,
}  # fmt: skip
# More text hardly changes a byte-level BPE, and training keeps its words in memory.
BPE_SAMPLE_BYTES = 32_000_000
#: maximum fraction of the text that a tokenizer may drop, checked from this number of bytes of validation text on
MOST_LOST, LOSS_SAMPLE_BYTES = 0.05, 1_000_000
# Text that is encoded at once.
_BATCH_BYTES = 1 << 22
#: number of validation documents recorded by name
_NAMED = 5


def prepare(config: CorpusConfig, *, progress: bool = True) -> Manifest:
    """Prepare the corpus of a config, or return the existing one.

    The corpus is written to a hidden folder next to `config.dir`, which is renamed at the end, so `config.dir`
    exists only when complete. A second process for the same folder waits for the first.

    Args:
        config: settings and folder of the corpus
        progress: if True, show a progress bar per phase

    Returns:
        The manifest, also in `config.dir`/manifest.json, next to the corpus's own layer of a run's config.

    Raises:
        ConfigError: the text or the tokenizer is not available, there is nothing to split, or `config.dir` has
            other content, or a corpus whose text has changed since
    """
    wanted = "a local folder. Prepare the corpus there and copy it to the store."
    expect(not is_remote(config.dir), "dir", config.dir, wanted)
    target = Path(config.dir).expanduser().resolve()
    try:
        if (manifest := _existing(config, target)) is None:
            with locked(target, f"prepare of {target}"):
                # Another process may have prepared it while this one waited.
                manifest = _existing(config, target) or _build(config, target, progress)
    except OSError as error:
        raise ConfigError(f"preparing dir={config.dir} failed ({error}); check path, permissions and space.") from error
    return manifest


def _write_layer(config: CorpusConfig, vocab_size: int, folder: Path) -> None:
    """Write the settings that reproduce this corpus and the model's vocabulary size, as a layer of a run's config."""
    always, default = ("dir", "source", "tokenizer"), asdict(CorpusConfig())
    settings = {key: value for key, value in asdict(config).items() if key in always or value != default[key]}
    padded = -(-vocab_size // PADDED_TO) * PADDED_TO
    layer: dict[str, Any] = {"data": {"corpus": settings}, "model": {"backbone": {"vocab_size": padded}}}
    from omegaconf import OmegaConf  # imported here, because training does not need it

    OmegaConf.save(OmegaConf.create(layer), folder / LAYER)


def _existing(config: CorpusConfig, target: Path) -> Manifest | None:
    """Return the corpus in `target` if it matches the config, or None if there is none."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return None
    value = f"{config.dir}, which contains no prepared corpus"
    wanted = "a new folder. Choose a different one, or delete it."
    expect((target / FILENAME).is_file(), "dir", value, wanted)
    manifest = Manifest.load(target)
    then = manifest.settings
    changed = {key: value for key, value in config.settings().items() if then.get(key) != value}
    differing = [f"{key}={json.dumps(then.get(key))}, expected {json.dumps(now)}" for key, now in changed.items()]
    found, again = f"dir={config.dir} has a corpus", "delete it to prepare it again, or choose a different dir."
    if differing:
        raise ConfigError(f"{found} with other settings ({'; '.join(differing)}); {again}")
    check_corpus(manifest, target, checksums=False)
    file = tokenizer_file(config.tokenizer)
    if file is not None and file.is_file():
        same = file_sha256(file) == manifest.tokenizer_sha256
        if not same or open_tokenizer(config.tokenizer, config.eot).eot != manifest.eot:
            raise ConfigError(f"{found} whose tokenizer {file}, or its end-of-text token, has changed since; {again}")
    if changes := changed_text(manifest):
        hint = f"To train on it unchanged, use fit --config {config.dir}/{LAYER} --data.corpus.dir {config.dir}."
        raise ConfigError(f"{found} whose text has changed since ({changes}); {again} {hint}")
    return manifest


def _build(config: CorpusConfig, target: Path, shown: bool) -> Manifest:
    """Write the corpus to a hidden folder and rename it to `target`, which may be an empty folder."""
    size = bpe_size(config.tokenizer)
    if size is None:
        tokenizer = open_tokenizer(config.tokenizer, config.eot)  # checked before any reading
    elif config.eot not in (None, END_OF_TEXT):
        raise ConfigError(f"eot is {config.eot!r}; expected null, because tokenizer is {config.tokenizer}, no file.")
    states = file_states(config)  # before reading, so that concurrent changes are detected
    source = SOURCES[config.source.partition(":")[0]](config)
    try:
        documents = SplitDocuments(source, config.limit, config.val_fraction)
    except ConfigError as error:
        raise ConfigError(f"source={config.source}: {error}") from None
    if size is not None:
        tokenizer = _train_bpe(documents, size, shown)
    with atomic_path(target) as folder:
        splits, held_out, lost = _write_splits(config, documents, tokenizer, folder, shown)
        manifest = Manifest(
            version=FORMAT_VERSION,
            source=config.source,
            licence=config.licence or source.licence,
            packages=source.packages,
            settings=config.settings(),
            tokenizer=config.tokenizer,
            tokenizer_file=tokenizer.save(folder).name,
            tokenizer_sha256=tokenizer.sha256,
            vocab_size=tokenizer.vocab_size,
            eot=tokenizer.eot,
            dtype=tokenizer.dtype.name,
            splits=splits,
            duplicates=documents.duplicates,
            unreadable=len(source.unreadable),
            corpus_hash=corpus_hash(tokenizer.sha256, splits),
            sources=states,
            left_out=source.left_out,
            held_out=held_out,
            tokenizer_loss=lost,
        )
        _write_layer(config, tokenizer.vocab_size, folder)
        (folder / FILENAME).write_text(json.dumps(manifest.to_dict(), indent=2, sort_keys=True))
    check_corpus(manifest, target)  # now, because other users may not be able to write verified.json
    # The library's threads do not survive a fork, about which it would warn in every process forked later.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return manifest


def _train_bpe(documents: SplitDocuments, size: int, shown: bool) -> Tokenizer:
    """Train a BPE on the first training documents; validation text is not used."""
    with phase("training BPE", BPE_SAMPLE_BYTES, shown=shown) as step:

        def sample() -> Iterator[str]:
            n_bytes = 0
            for document, held_out in documents:
                if n_bytes >= BPE_SAMPLE_BYTES:
                    return
                if not held_out:
                    step(document.n_bytes)
                    n_bytes += document.n_bytes
                    yield document.text[:BPE_SAMPLE_BYTES]

        return Tokenizer.train(sample(), size)


def _write_splits(
    config: CorpusConfig, documents: SplitDocuments, tokenizer: Tokenizer, folder: Path, shown: bool
) -> tuple[dict[str, SplitInfo], list[str], float]:
    """Encode the documents into splits; also return the first validation sources and the lost fraction."""
    writers = {name: ShardWriter(folder / name, config.chunk_size, tokenizer.dtype) for name in SPLITS}
    total = min((n for n in (documents.source.total_bytes, config.limit) if n is not None), default=None)
    eot = np.array([tokenizer.eot], dtype=tokenizer.dtype)
    held_out, lost = list[str](), 0
    with phase("encoding", total, shown=shown) as step:
        for batch in _batches(documents):
            encoded = tokenizer.encode_batch([document.text for document, _ in batch])
            for (document, is_val), ids in zip(batch, encoded, strict=True):
                if (ids == tokenizer.eot).any():
                    is_unknown = tokenizer.eot == tokenizer.unknown
                    contains = "unknown text is encoded as" if is_unknown else "the text contains"
                    found = f"{document.where}: {contains} {tokenizer.eot_token!r}, the end-of-text token"
                    raise ConfigError(f"{found}; remove it, or set data.corpus.eot to a token that is in no text.")
                n_bytes = document.n_bytes
                if is_val:
                    n_bytes -= round(n_bytes * tokenizer.lost_share(document.text, ids.tolist()))
                    lost += document.n_bytes - n_bytes
                    if len(held_out) < _NAMED:
                        held_out.append(document.where)
                writers["val" if is_val else "train"].add(np.concatenate((ids, eot)), n_bytes)
                step(document.n_bytes)
            _check_lost(lost, max(writers["val"].text_bytes + lost, LOSS_SAMPLE_BYTES), config.tokenizer)
    val_bytes = writers["val"].text_bytes + lost
    _check_lost(lost, val_bytes, config.tokenizer)
    return {name: writer.finish() for name, writer in writers.items()}, held_out, lost / val_bytes


def _batches(documents: SplitDocuments) -> Iterator[list[tuple[Document, bool]]]:
    """Yield lists of documents of about `_BATCH_BYTES`, which the tokenizer's library encodes on all cores."""
    batch: list[tuple[Document, bool]] = []
    n_bytes = 0
    for document, is_val in documents:
        batch.append((document, is_val))
        n_bytes += document.n_bytes
        if n_bytes >= _BATCH_BYTES:
            yield batch
            batch, n_bytes = [], 0
    if batch:
        yield batch


def _check_lost(lost: int, n_bytes: int, tokenizer: str) -> None:
    if lost > MOST_LOST * n_bytes:
        wanted = f"at most {MOST_LOST:.0%}. Use one that knows its characters, for example bpe:4096."
        raise ConfigError(f"tokenizer={tokenizer} drops {lost / n_bytes:.0%} of this text; expected {wanted}")
