"""Preparation of a corpus: read, train the tokenizer, encode, write, count, publish."""

import json
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from lightning_sv.atomic import atomic_path
from lightning_sv.corpus.config import LAYER, PADDED_TO, CorpusConfig
from lightning_sv.corpus.encode import encode_documents
from lightning_sv.corpus.loss import check_sample, check_share, lost_share
from lightning_sv.corpus.manifest import FILENAME, FORMAT_VERSION, Manifest, SplitInfo, corpus_hash
from lightning_sv.corpus.progress import phase
from lightning_sv.corpus.remote import is_remote
from lightning_sv.corpus.sources.registry import (
    SplitDocuments,
    UniqueDocuments,
    changed_text,
    listed,
    open_source,
    source_state,
)
from lightning_sv.corpus.sources.state import file_bytes, hashed
from lightning_sv.corpus.tokenizer import JsonTokenizer, Tokenizer, bpe_size, check_end, open_tokenizer
from lightning_sv.corpus.validate import SHOWN_BYTES, check_corpus
from lightning_sv.corpus.writer import ShardWriter
from lightning_sv.errors import ConfigError

log = logging.getLogger(__name__)

# More text hardly changes a byte-level BPE, and training keeps its words in memory.
BPE_SAMPLE_BYTES = 32_000_000
# Print a message if the lock is not acquired within this many seconds.
_SILENT_WAIT_S = 1.0
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
    if is_remote(config.dir):
        raise ConfigError(
            f"dir is {config.dir}; expected a local folder. Prepare the corpus there and copy it to the store."
        )
    target = Path(config.dir).expanduser().resolve()
    try:
        if (manifest := _existing(config, target)) is not None:
            return manifest
        return _prepare(config, target, progress)
    except OSError as error:
        raise ConfigError(
            f"preparing dir={config.dir} failed ({error}); check the path, its permissions and the free space."
        ) from error


def _prepare(config: CorpusConfig, target: Path, shown: bool) -> Manifest:
    with _alone(target):
        if (manifest := _existing(config, target)) is not None:  # prepared while this process waited
            return manifest
        with atomic_path(target) as partial:  # replaces only an empty folder
            partial.mkdir()
            manifest = _build(config, partial, shown)
            _write_layer(config, manifest.vocab_size, partial)
            manifest.save(partial)
    return manifest


def _write_layer(config: CorpusConfig, vocab_size: int, folder: Path) -> None:
    """Write the settings that reproduce this corpus and the model's vocabulary size, as a layer of a run's config."""
    always, default = ("dir", "source", "tokenizer"), asdict(CorpusConfig())
    settings = {key: value for key, value in asdict(config).items() if key in always or value != default[key]}
    settings.pop("workers", None)  # specific to one machine
    padded = -(-vocab_size // PADDED_TO) * PADDED_TO
    layer: dict[str, Any] = {"data": {"corpus": settings}, "model": {"backbone": {"vocab_size": padded}}}
    from omegaconf import OmegaConf  # imported here, because training does not need it

    OmegaConf.save(OmegaConf.create(layer), folder / LAYER)


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Hold the lock of `target`, with a message while waiting; leave no lock file or new empty folder."""
    missing = [folder for folder in target.parents if not folder.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=target.parent):  # FileLock would retry forever in a folder that is not writable
        pass
    path = target.parent / f".{target.name}.lock"
    lock = FileLock(path)
    try:
        lock.acquire(timeout=_SILENT_WAIT_S)
    except Timeout:
        log.info("waiting for another prepare of %s (Ctrl-C ends the wait)", target)
        lock.acquire()
    try:
        yield
    finally:
        with suppress(OSError):  # waiting processes create a new lock file
            path.unlink()
        lock.release()
        with suppress(OSError):  # not empty
            for folder in missing:
                folder.rmdir()


def _existing(config: CorpusConfig, target: Path) -> Manifest | None:
    """Return the corpus in `target` if it matches the config, or None if there is none."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return None
    if not (target / FILENAME).is_file():
        raise ConfigError(f"dir={config.dir} exists but has no prepared corpus; choose another dir, or delete it.")
    manifest = Manifest.load(target)
    # Settings unknown to older versions had their defaults.
    recorded = CorpusConfig().settings() | manifest.settings
    requested = config.settings()
    differing = [
        f"{key}={json.dumps(recorded[key])}, expected {json.dumps(value)}"
        for key, value in requested.items()
        if recorded[key] != value
    ]
    if differing:
        raise ConfigError(
            f"dir={config.dir} has a corpus with other settings ({'; '.join(differing)}); "
            "choose another dir, or delete it."
        )
    # The tokenizer file of that name may have changed, or the files here may be damaged.
    check_corpus(manifest, target, tokenizer=config.tokenizer, checksums=False)
    _check_text(config, manifest)
    return manifest


def _check_text(config: CorpusConfig, manifest: Manifest) -> None:
    """Raise an error if the text of a user's corpus has changed, or log a warning."""
    if not (changes := changed_text(manifest, ask_hub=True)):
        return
    # 'stdlib' is a reference corpus for any installed versions; a new dataset revision may be a new description only.
    if config.source == "stdlib" or changes[0].startswith("hf:"):
        log.warning("%s is used although its text has changed: %s", config.dir, listed(changes))
        return
    raise ConfigError(
        f"dir={config.dir} has a corpus whose text has changed since: {listed(changes)}. Delete it to prepare it "
        f"again, or choose another dir. To train on it unchanged, use fit --config {config.dir}/{LAYER}."
    )


def _build(config: CorpusConfig, folder: Path, shown: bool) -> Manifest:
    n_tokens = bpe_size(config.tokenizer)
    # Check the path before any reading.
    tokenizer = open_tokenizer(config.tokenizer, config.eot) if n_tokens is None else None
    state = source_state(config, ask_hub=True)  # before reading, so that concurrent changes are detected
    size = file_bytes(state)
    with phase("hashing text", size, shown=shown and size > SHOWN_BYTES) as step:
        state = hashed(state, step)
    source = open_source(config, shown)
    try:
        documents = SplitDocuments(UniqueDocuments(source, config.max_bytes), config.val_fraction)
    except ConfigError as error:
        raise ConfigError(f"source={config.source}: {error}") from None
    if tokenizer is None:
        assert n_tokens is not None
        tokenizer = _train_bpe(documents, n_tokens, source.total_bytes, shown)
    else:
        check_sample(tokenizer, documents, config.tokenizer)
    check_end(tokenizer, config.eot)
    splits, held_out, lost = _write_splits(config, documents, tokenizer, folder, shown)
    tokenizer_file = tokenizer.save(folder)
    return Manifest(
        version=FORMAT_VERSION,
        source=config.source,
        licence=config.licence or source.licence,
        packages=source.packages,
        settings=config.settings(),
        tokenizer=config.tokenizer,
        tokenizer_file=tokenizer_file.name,
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        eot=tokenizer.eot,
        dtype=tokenizer.dtype.name,
        splits=splits,
        duplicates=documents.documents.duplicates,
        unreadable=len(source.unreadable),
        corpus_hash=corpus_hash(tokenizer.sha256, splits),
        sources=state,
        left_out=source.left_out,
        held_out=held_out,
        tokenizer_loss=lost,
    )


def _train_bpe(documents: SplitDocuments, size: int, total_bytes: int | None, shown: bool) -> Tokenizer:
    """Train a BPE on the first training documents; validation text is not used."""
    size_read = min(BPE_SAMPLE_BYTES, total_bytes or BPE_SAMPLE_BYTES)
    with phase("training BPE", size_read, shown=shown) as step:

        def sample() -> Iterator[str]:
            n_bytes = 0
            for document in documents:
                if n_bytes >= BPE_SAMPLE_BYTES:
                    return
                if not documents.held_out(document):
                    step(document.n_bytes)
                    n_bytes += document.n_bytes
                    yield document.text

        return JsonTokenizer.train(sample(), size)


def _write_splits(
    config: CorpusConfig, documents: SplitDocuments, tokenizer: Tokenizer, folder: Path, shown: bool
) -> tuple[dict[str, SplitInfo], list[str], float]:
    """Encode the documents into splits; also return the first validation sources and the lost fraction."""
    writers = {name: ShardWriter(folder / name, config.chunk_size, tokenizer.dtype) for name in ("train", "val")}
    unique = documents.documents
    total = min((n for n in (unique.source.total_bytes, config.max_bytes) if n is not None), default=None)
    held_out, lost = list[str](), 0
    with phase("encoding", total, shown=shown) as step:
        for document, ids in encode_documents(documents, tokenizer, config.workers):
            n_bytes = document.n_bytes
            if documents.held_out(document):
                n_bytes -= round(n_bytes * lost_share(tokenizer, document.text, ids[:-1].tolist()))
                lost += document.n_bytes - n_bytes
                if len(held_out) < _NAMED:
                    held_out.append(document.where)
                writers["val"].add(ids, n_bytes)
            else:
                writers["train"].add(ids, n_bytes)
            step(document.n_bytes)
    share = lost / (lost + writers["val"].text_bytes)
    check_share(share, config.tokenizer)
    return {name: writer.finish() for name, writer in writers.items()}, held_out, share
