"""Checks that a prepared corpus is complete, unmodified, and suitable for a model.

litdata detects damage late or not at all: a truncated shard causes a time-out in the middle of an
epoch, a wrong id no error, a sequence longer than a shard an empty dataset. Therefore everything is
checked during setup.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from lightning_sv.atomic import file_sha256, read_json, write_atomically
from lightning_sv.corpus.config import LAYER
from lightning_sv.corpus.manifest import CHECKSUM, SPLITS, Manifest, Shard
from lightning_sv.corpus.progress import in_threads
from lightning_sv.corpus.shards import header_bytes, index_of
from lightning_sv.corpus.tokenizer import tokenizer_file
from lightning_sv.errors import ConfigError

#: file next to manifest.json that `check_corpus` writes after it has hashed all shards
STAMP = "verified.json"


def check_corpus(
    manifest: Manifest,
    dir: str | Path,
    *,
    vocab_size: int | None = None,
    seq_len: int | None = None,
    tokenizer: str | None = None,
    checksums: bool = True,
) -> None:
    """Check the files of a corpus against its manifest, and the corpus against a model.

    Args:
        manifest: manifest of the corpus
        dir: folder with manifest.json and the shards
        vocab_size: vocabulary size of the model, at least that of the corpus (larger is padding)
        seq_len: sequence length; both splits must have a sequence of seq_len + 1 tokens
        tokenizer: tokenizer in the user's config, which must be that of the corpus
        checksums: if True, hash every shard, on up to 8 threads at 1 GB/s each or the speed of the
            disk, unless verified.json of the last time shows that they have not changed since

    Raises:
        ConfigError: the first failed check, with the file and a hint
    """
    corpus = _Corpus(manifest, Path(dir))
    corpus.check_tokenizer(tokenizer)
    if vocab_size is not None:
        corpus.check_vocabulary(vocab_size)
    for name in SPLITS:
        corpus.check_split(name)
        if seq_len is not None:
            corpus.check_length(name, seq_len)
    if checksums:
        corpus.check_contents()


class _Corpus:
    """A folder, and the manifest that it must match."""

    def __init__(self, manifest: Manifest, root: Path):
        self.manifest = manifest
        self.root = root

    def damaged(self, found: str) -> ConfigError:
        """Return the error of a corpus that is not the one that was prepared."""
        return ConfigError(f"{found}; delete {self.root} and prepare it again.")

    def file(self, name: str) -> Path:
        """Return a file of the corpus, which must be inside its folder, also behind links."""
        path = self.root / name
        if not path.is_file():
            raise self.damaged(f"{path} is missing")
        if not path.resolve().is_relative_to(self.root.resolve()):
            raise ConfigError(
                f"{path} is a link out of {self.root}; copy the file, or link the folder."
            )
        return path

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check that a model has all ids of the corpus."""
        if vocab_size < self.manifest.vocab_size:
            expected = f"at least {self.manifest.vocab_size}, for the corpus in {self.root}"
            hint = f"Set model.backbone.vocab_size, or add --config with its {LAYER}."
            raise ConfigError(f"vocab_size is {vocab_size}; expected {expected}. {hint}")

    def check_length(self, name: str, seq_len: int) -> None:
        """Check that a split has a sequence of seq_len + 1 tokens."""
        split = self.manifest.splits[name]
        if split.sequences(seq_len):
            return
        longest = max((shard.tokens for shard in split.shards), default=0)
        expected = f"at most {longest - 1}, the largest shard minus 1"
        settings = "val_fraction, max_bytes, chunk_bytes"
        hint = f"Lower seq_len, or prepare more text or larger shards ({settings})."
        folder = self.root / name
        raise ConfigError(f"{folder}: seq_len is {seq_len}; expected {expected}. {hint}")

    def check_tokenizer(self, spec: str | None) -> None:
        """Check the tokenizer's file, and that a specification names this tokenizer."""
        manifest = self.manifest
        path = self.file(manifest.tokenizer_file)
        if file_sha256(path) != manifest.tokenizer_sha256:
            raise self.damaged(f"{path} is not the tokenizer that made the shards")
        if spec in (None, manifest.tokenizer):
            return
        file = tokenizer_file(spec)
        if file and file.is_file() and file_sha256(file) == manifest.tokenizer_sha256:
            return
        expected = f"{manifest.tokenizer}, with which the corpus in {self.root} was prepared"
        hint = f"Set data.corpus.tokenizer to it, or add --config with its {LAYER}."
        raise ConfigError(f"tokenizer is {spec}; expected {expected}. {hint}")

    def check_split(self, name: str) -> None:
        """Check litdata's index of a split, as plain tokens, and the sizes of its shards."""
        manifest = self.manifest
        shards = manifest.splits[name].shards
        path = self.file(f"{name}/index.json")
        index = read_json(path, f"delete {self.root} and prepare it again.")
        if index != index_of(shards, manifest.settings["chunk_bytes"], manifest.dtype):
            raise self.damaged(f"{path} is not the index of the shards of manifest.json")

        token_bytes = np.dtype(manifest.dtype).itemsize
        for shard in shards:
            path = self.file(shard.file)
            size = path.stat().st_size
            expected = header_bytes(shard.documents) + token_bytes * shard.tokens
            if not size == shard.bytes == expected:
                raise self.damaged(f"{path} has {size:,} bytes; expected {expected:,}")

    def check_contents(self) -> None:
        """Hash the shards, unless the stamp in their folder is current."""
        stamp = self.root / STAMP
        state = self._state()  # before hashing, so that concurrent changes are detected
        if _read_stamp(stamp) == state:
            return
        shards = self.manifest.shards
        size = sum(shard.bytes for shard in shards)
        in_threads("checking shards", self._check_shard, shards, size)
        with suppress(OSError):  # e.g. not writable, or written by another node
            write_atomically(stamp, json.dumps(state))

    def _state(self) -> dict[str, Any]:
        """Return what the file `STAMP` has: the manifest's checksum, and the state of each shard.

        The state is its size and change time (ctime). Programs cannot set the change time, and that
        of a copy is new. Neither holds for the modification time.
        """
        files = {}
        for shard in self.manifest.shards:
            status = (self.root / shard.file).stat()
            files[shard.file] = [status.st_size, status.st_ctime_ns]
        return {CHECKSUM: self.manifest.manifest_sha256, "files": files}

    def _check_shard(self, shard: Shard) -> int:
        """Check the hash and the largest token of a shard; return its bytes."""
        path = self.root / shard.file
        if file_sha256(path) != shard.sha256:
            raise self.damaged(f"{path} does not match its sha256 in manifest.json")
        header = header_bytes(shard.documents)
        tokens = np.memmap(path, self.manifest.dtype, mode="r", offset=header)
        largest = tokens.max()
        if largest >= self.manifest.vocab_size:
            raise self.damaged(f"{path} has token {largest}, outside the vocabulary")
        return shard.bytes


def _read_stamp(path: Path) -> dict[str, Any] | None:
    """Return the content of the file `STAMP`; None if it is missing or damaged."""
    try:
        return read_json(path, "it is written again.")
    except ConfigError:
        return None
