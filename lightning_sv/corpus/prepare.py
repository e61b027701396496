"""Text to a prepared corpus: read, train the tokenizer, encode, write, count, publish."""

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

# A byte-level BPE changes little with more text than this, and training keeps its words in memory.
BPE_SAMPLE_BYTES = 32_000_000
# A wait that is longer is said.
_SILENT_WAIT_S = 1.0
#: validation documents whose names are kept
_NAMED = 5


def prepare(config: CorpusConfig, *, progress: bool = True) -> Manifest:
    """Make the corpus that a config describes, or find that it is already there.

    The work is done in a hidden folder beside `config.dir`, which is renamed when all is written: `config.dir`
    exists only complete. A second process that prepares the same folder waits for the first.

    Args:
        config: what to make, and where
        progress: show a bar for each phase

    Returns:
        The manifest, also in `config.dir`/manifest.json; beside it lies the corpus's own layer of a run's config.

    Raises:
        ConfigError: the text or the tokenizer cannot be had, there is nothing to split, or `config.dir` already holds
            something else, or a corpus of text that has changed since
    """
    target = Path(config.dir).expanduser().resolve()
    try:
        if (found := _existing(config, target)) is not None:
            return found
        return _prepare(config, target, progress)
    except OSError as error:
        raise ConfigError(
            f"preparing dir={config.dir} failed ({error}); check the path, its permissions and the free space."
        ) from error


def _prepare(config: CorpusConfig, target: Path, shown: bool) -> Manifest:
    with _alone(target):
        if (found := _existing(config, target)) is not None:  # made while this process waited
            return found
        with atomic_path(target) as partial:  # replaces an empty folder, never a full one
            partial.mkdir()
            manifest = _build(config, partial, shown)
            _write_layer(config, manifest.vocab_size, partial)
            manifest.save(partial)
    return manifest


def _write_layer(config: CorpusConfig, vocab_size: int, folder: Path) -> None:
    """Write what makes this corpus again, and the vocabulary of a model that reads it, as a layer of a run's config."""
    always, default = ("dir", "source", "tokenizer"), asdict(CorpusConfig())
    made = {key: value for key, value in asdict(config).items() if key in always or value != default[key]}
    made.pop("workers", None)  # of one preparation
    padded = -(-vocab_size // PADDED_TO) * PADDED_TO
    layer: dict[str, Any] = {"data": {"corpus": made}, "model": {"backbone": {"vocab_size": padded}}}
    from omegaconf import OmegaConf  # here: a machine that only trains prepared tokens need not have it

    OmegaConf.save(OmegaConf.create(layer), folder / LAYER)


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Wait, after a message, until no other process prepares `target`; leave no lock and no new empty folder.

    Raises:
        OSError: nothing can be written next to it. The lock itself would be tried for ever
    """
    missing = [folder for folder in target.parents if not folder.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=target.parent):
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
        with suppress(OSError):  # those who wait see that it is gone, and make their own
            path.unlink()
        lock.release()
        with suppress(OSError):  # not empty
            for folder in missing:
                folder.rmdir()


def _existing(config: CorpusConfig, target: Path) -> Manifest | None:
    """The corpus in `target` if it is the one asked for; None if there is nothing."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return None
    if not (target / FILENAME).is_file():
        raise ConfigError(f"dir={config.dir} exists and holds no prepared corpus; choose another dir, or delete it.")
    manifest = Manifest.load(target)
    # Settings that an earlier version did not know had their default.
    known = CorpusConfig().settings() | manifest.settings
    wanted = config.settings()
    differing = [
        f"{key}={json.dumps(known[key])} there, {json.dumps(value)} wanted"
        for key, value in wanted.items()
        if known[key] != value
    ]
    if differing:
        raise ConfigError(
            f"dir={config.dir} holds a corpus made with other settings ({'; '.join(differing)}); "
            "choose another dir, or delete it."
        )
    # The same name may by now stand for another tokenizer file, or the files here may be damaged.
    check_corpus(manifest, target, tokenizer=config.tokenizer, checksums=False)
    _check_text(config, manifest)
    return manifest


def _check_text(config: CorpusConfig, manifest: Manifest) -> None:
    """Refuse a corpus of the user's text that has changed, or print a note."""
    if not (changes := changed_text(manifest, ask_hub=True)):
        return
    # The embedded corpus is a reference whatever is installed now; a dataset's revision may be a new description.
    if config.source == "stdlib" or changes[0].startswith("hf:"):
        log.warning("%s is used as it is, although its text has changed: %s", config.dir, listed(changes))
        return
    raise ConfigError(
        f"dir={config.dir} holds a corpus of text that has changed since: {listed(changes)}; delete it to prepare it "
        f"again, or choose another dir (fit --config {config.dir}/{LAYER} trains on it as it is)."
    )


def _build(config: CorpusConfig, folder: Path, shown: bool) -> Manifest:
    n_tokens = bpe_size(config.tokenizer)
    # A bad path fails before any reading.
    tokenizer = open_tokenizer(config.tokenizer, config.eot) if n_tokens is None else None
    state = source_state(config, ask_hub=True)  # before the text is read: what changes meanwhile is noticed later
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
    """A BPE learned on the first training documents; validation text stays unseen."""
    size_read = min(BPE_SAMPLE_BYTES, total_bytes or BPE_SAMPLE_BYTES)
    with phase("training BPE", size_read, shown=shown) as step:

        def sample() -> Iterator[str]:
            taken = 0
            for document in documents:
                if documents.held_out(document):
                    continue
                step(document.n_bytes)
                yield document.text
                taken += document.n_bytes
                if taken >= BPE_SAMPLE_BYTES:
                    return

        return JsonTokenizer.train(sample(), size)


def _write_splits(
    config: CorpusConfig, documents: SplitDocuments, tokenizer: Tokenizer, folder: Path, shown: bool
) -> tuple[dict[str, SplitInfo], list[str], float]:
    """Encode every document into its split; also return where validation begins, and the share of it that is lost."""
    writers = {name: ShardWriter(folder / name, config.chunk_size, tokenizer.dtype) for name in ("train", "val")}
    unique = documents.documents
    total = min((n for n in (unique.source.total_bytes, config.max_bytes) if n is not None), default=None)
    held_out, lost = list[str](), 0
    with phase("encoding", total, shown=shown) as step:
        for document, ids in encode_documents(documents, tokenizer, config.workers):
            kept = document.n_bytes
            if documents.held_out(document):
                kept -= round(kept * lost_share(tokenizer, document.text, ids[:-1].tolist()))
                lost += document.n_bytes - kept
                if len(held_out) < _NAMED:
                    held_out.append(document.where)
                writers["val"].add(ids, kept)
            else:
                writers["train"].add(ids, kept)
            step(document.n_bytes)
    share = lost / (lost + writers["val"].text_bytes)
    check_share(share, config.tokenizer)
    return {name: writer.finish() for name, writer in writers.items()}, held_out, share
