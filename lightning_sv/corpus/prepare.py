"""Preparation of a corpus: plan its parts, encode them, drop duplicates, write shards, publish."""

import os
from pathlib import Path

from lightning_sv.atomic import locked
from lightning_sv.corpus.assemble import publish
from lightning_sv.corpus.config import CorpusConfig
from lightning_sv.corpus.existing import existing_corpus
from lightning_sv.corpus.job import plan_job
from lightning_sv.corpus.manifest import Manifest
from lightning_sv.corpus.parts import PART_BYTES
from lightning_sv.corpus.remote import is_remote
from lightning_sv.corpus.work import encode_enough
from lightning_sv.errors import ConfigError, expect


def prepare(
    config: CorpusConfig,
    *,
    progress: bool = True,
    workers: int = 1,
    part_bytes: int = PART_BYTES,
) -> Manifest:
    """Prepare the corpus of a config, or return the existing one.

    Parts of the text are encoded in the folder NAME.parts next to `config.dir`, by any number of
    processes, and kept until the corpus is complete, so that the next start with equal settings
    goes on after a kill, a full disk or a lost connection. Then duplicates are dropped, and the
    corpus is written next to the parts and renamed, so `config.dir` exists only when complete. A
    second call for the same folder waits for the first. The corpus does not depend on the number of
    processes, on the size of parts, or on interruptions.

    Args:
        config: settings and folder of the corpus
        progress: if True, show a progress bar per phase
        workers: number of processes that encode; they do not import the calling script
        part_bytes: bytes of text of a part, of which a killed process loses one

    Returns:
        The manifest, also in `config.dir`/manifest.json, next to the corpus's own layer of a run's
        config.

    Raises:
        ConfigError: the text or the tokenizer is not available, there is nothing to split, or
            `config.dir` has other content, or a corpus whose text has changed since
        RunError: one of several workers died; the next start goes on with the complete parts
    """
    expected = "a local folder. Prepare the corpus there and copy it to the store."
    expect(not is_remote(config.dir), "dir", config.dir, expected)
    target = Path(config.dir).expanduser().resolve()
    try:
        manifest = existing_corpus(config, target)  # without the lock, for a read-only folder
        if manifest is not None:
            return manifest
        with locked(target, f"prepare of {target}"):
            manifest = existing_corpus(config, target)
            if manifest is not None:  # another process has prepared it while this one waited
                return manifest
            job = plan_job(config, target, part_bytes, shown=progress)
            selection = encode_enough(job, workers, shown=progress)
            return publish(job, selection, target, shown=progress)
    except OSError as error:
        found = f"preparing dir={config.dir} failed ({error})"
        raise ConfigError(f"{found}; check path, permissions and space.") from error


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))
