"""Preparation of a corpus: plan its parts, encode them, drop duplicates, write shards, publish."""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_sv.atomic import file_sha256, locked, remove
from lightning_sv.corpus.assemble import publish
from lightning_sv.corpus.config import LAYER, CorpusConfig
from lightning_sv.corpus.job import FILENAME as JOB
from lightning_sv.corpus.job import GROWING, Job, open_job, parts_folder
from lightning_sv.corpus.manifest import FILENAME, Manifest
from lightning_sv.corpus.parts import PART_BYTES
from lightning_sv.corpus.remote import is_remote
from lightning_sv.corpus.selection import Selection
from lightning_sv.corpus.sources.files import changed_file
from lightning_sv.corpus.tokenizer import open_tokenizer, tokenizer_file
from lightning_sv.corpus.validate import check_corpus
from lightning_sv.corpus.work import encode_enough
from lightning_sv.errors import ConfigError, expect

log = logging.getLogger(__name__)


def prepare(
    config: CorpusConfig,
    *,
    progress: bool = True,
    workers: int = 1,
    part_bytes: int = PART_BYTES,
) -> Manifest:
    """Prepare the corpus of a config, or return the existing one.

    Parts of the text are encoded in the folder NAME.parts next to `config.dir`, by any number of
    processes, and kept until the corpus is complete, so that the next start goes on after a kill, a
    full disk or a lost connection. Then duplicates are dropped, and the corpus is written next to
    the parts and renamed, so `config.dir` exists only when complete. A second call for the same
    folder waits for the first. The corpus does not depend on the number of processes, on the size
    of parts, or on interruptions.

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
    expect(workers >= 1, "--workers", workers, "at least 1.")
    expect(part_bytes >= 1, "--part_bytes", part_bytes, "at least 1.")
    target = Path(config.dir).expanduser().resolve()
    try:
        return _prepare(config, target, workers, part_bytes, shown=progress)
    except OSError as error:
        found = f"preparing dir={config.dir} failed ({error})"
        raise ConfigError(f"{found}; check path, permissions and space.") from error


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _prepare(
    config: CorpusConfig, target: Path, workers: int, part_bytes: int, *, shown: bool
) -> Manifest:
    manifest = _existing(config, target)  # without the lock, for a folder that is read-only
    if manifest is not None:
        _remove_left_parts(config, target)
        return manifest
    with locked(target, f"prepare of {target}"):
        manifest = _existing(config, target)
        if manifest is not None:  # another process has prepared it while this one waited
            return manifest
        job = open_job(config, target, part_bytes, shown=shown)
        selection = _encode(job, workers, shown=shown)
        return publish(job, selection, target, workers, shown=shown)


def _encode(job: Job, workers: int, *, shown: bool) -> Selection:
    """Encode the parts that are needed; after an error, keep those that are complete."""
    try:
        return encode_enough(job, workers, shown=shown)
    except ConfigError:
        is_unused = not any(part.is_complete() for part in job.parts)
        if is_unused:
            remove(job.folder)
        raise


def _remove_left_parts(config: CorpusConfig, target: Path) -> None:
    """Remove the parts that a process left which was killed after it had published the corpus."""
    folder = parts_folder(target)
    if config.max_tokens is None and (folder / JOB).is_file():
        remove(folder)


def _existing(config: CorpusConfig, target: Path) -> Manifest | None:
    """Return the corpus in `target` if it matches the config, or None if there is none."""
    if _is_vacant(target):
        return None
    if not (target / FILENAME).is_file():
        found = f"{config.dir}, which contains no prepared corpus"
        expected = "a new folder. Choose a different one, or delete it."
        raise ConfigError(f"dir is {found}; expected {expected}")

    manifest = Manifest.load(target)
    changed = _changed_settings(config, manifest)
    only_grows = changed.keys() == {GROWING} and (parts_folder(target) / JOB).is_file()
    if only_grows:
        return None

    found = f"dir={config.dir} has a corpus"
    again = "delete it to prepare it again, or choose a different dir."
    if changed:
        raise ConfigError(f"{found} with other settings ({_listed(changed)}); {again}")
    check_corpus(manifest, target, checksums=False)
    if _has_other_tokenizer(config, manifest):
        reason = f"whose tokenizer {config.tokenizer}, or its end-of-text token, has changed since"
        raise ConfigError(f"{found} {reason}; {again}")
    file = changed_file(manifest)
    if file is not None:
        words = f"fit --config {config.dir}/{LAYER} --data.corpus.dir {config.dir}"
        hint = f"To train on it unchanged, use {words}."
        raise ConfigError(f"{found} whose text has changed since ({file}); {again} {hint}")
    return manifest


def _is_vacant(target: Path) -> bool:
    """Return True if a path does not exist, or is an empty folder."""
    if not target.exists():
        return True
    return target.is_dir() and not any(target.iterdir())


def _changed_settings(config: CorpusConfig, manifest: Manifest) -> dict[str, tuple[Any, Any]]:
    """Return key -> (value of the prepared corpus, value of the config) where they differ."""
    changed = {}
    for key, now in config.settings().items():
        then = manifest.settings.get(key)
        if then != now:
            changed[key] = (then, now)
    return changed


def _listed(changed: Mapping[str, tuple[Any, Any]]) -> str:
    settings = []
    for key, (then, now) in changed.items():
        settings.append(f"{key}={json.dumps(then)}, expected {json.dumps(now)}")
    return "; ".join(settings)


def _has_other_tokenizer(config: CorpusConfig, manifest: Manifest) -> bool:
    """Return True if the config's tokenizer file, or its end token, differs from a corpus's."""
    file = tokenizer_file(config.tokenizer)
    if file is None or not file.is_file():
        return False
    if file_sha256(file) != manifest.tokenizer_sha256:
        return True
    return open_tokenizer(config.tokenizer, config.eot).eot != manifest.eot
