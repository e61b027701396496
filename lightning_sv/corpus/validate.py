"""Checks that a prepared corpus is complete, unmodified, and suitable for a model.

litdata detects damage late or not at all: a truncated shard causes a time-out in the middle of an
epoch, a wrong id no error, a sequence longer than a shard an empty dataset. Therefore everything is
checked during setup.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from lightning_sv.atomic import file_sha256, locked, regular, write_atomically
from lightning_sv.corpus.config import LAYER
from lightning_sv.corpus.manifest import CHECKSUM, SPLITS, Manifest, Shard
from lightning_sv.corpus.progress import in_threads
from lightning_sv.corpus.tokenizer import read_file, tokenizer_file
from lightning_sv.errors import ConfigError, expect

# Above this size, hashing takes more than a second or two and shows a progress bar.
SHOWN_BYTES = 2 << 30
#: file next to manifest.json that `check_corpus` writes after it has hashed all shards
STAMP = "verified.json"
# Wait at most this long for a different process that hashes: half of the time that other ranks wait
# for this one.
_WAIT_S = 300.0
# Write the stamp this often while hashing, because a restart after a rank's time-out would hash all
# shards again.
_STAMP_S = 10.0
# litdata's names of 1-D NumPy arrays of these types. Other formats are rejected: some are pickles.
DATA_FORMATS = {"uint16": ["no_header_numpy:5"], "uint32": ["no_header_numpy:6"]}
# litdata's index of uncompressed, unencrypted shards with one array per document.
_PLAIN = {
    "compression": None,
    "data_spec": '[1, {"type": null, "context": null, "children_spec": []}]',
    "encryption": None,
    "item_loader": "TokensLoader",
}


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
    root = Path(dir)
    _check_tokenizer(manifest, root, tokenizer)
    hint = f"Set model.backbone.vocab_size{_by_layer(root)}."
    wanted = f"at least {manifest.vocab_size}, for the corpus in {dir}. {hint}"
    expect(
        vocab_size is None or vocab_size >= manifest.vocab_size, "vocab_size", vocab_size, wanted
    )
    for name in SPLITS:
        _check_split(manifest, root, name)
        split = manifest.splits[name]
        longest = max((shard.tokens for shard in split.shards), default=0)
        hint = "Lower seq_len, or prepare more text or larger shards (val_fraction, max_bytes, chunk_bytes)."
        wanted = f"at most {longest - 1}, the largest shard minus 1. {hint}"
        expect(
            seq_len is None or split.sequences(seq_len) > 0,
            f"{root / name}: seq_len",
            seq_len,
            wanted,
        )
    if checksums:
        _check_contents(manifest, root)


def _check_tokenizer(manifest: Manifest, root: Path, spec: str | None) -> None:
    path = _file(root, manifest.tokenizer_file)
    if file_sha256(path) != manifest.tokenizer_sha256:
        raise ConfigError(f"{path} is not the tokenizer that made the shards; {_again(root)}")
    if spec is None or spec == manifest.tokenizer:
        return
    file = tokenizer_file(spec)
    same = (
        file is not None
        and hashlib.sha256(read_file(file)).hexdigest() == manifest.tokenizer_sha256
    )
    hint = f"Use that one{_by_layer(root)}, or prepare a different folder."
    expect(
        same,
        "tokenizer",
        spec,
        f"{manifest.tokenizer}, with which the corpus in {root} was prepared. {hint}",
    )


def _by_layer(root: Path) -> str:
    layer = root / LAYER
    return f" (--config {layer} sets it)" if layer.is_file() else ""


def _check_split(manifest: Manifest, root: Path, name: str) -> None:
    """Check litdata's index of a split, the sizes of its files, and its totals."""
    split = manifest.splits[name]
    _check_index(manifest, root, name)
    for shard in split.shards:
        _check_size(manifest, root, shard)

    n_tokens = sum(shard.tokens for shard in split.shards)
    n_documents = sum(shard.documents for shard in split.shards)
    if (n_tokens, n_documents) != (split.tokens, split.documents):
        found = f"{root}/manifest.json: the shards of {name} do not add up to its totals"
        raise ConfigError(f"{found}; {_again(root)}")

    largest = max(split.largest_token, manifest.eot)
    most = np.iinfo(manifest.dtype).max + 1
    if not 0 <= largest < manifest.vocab_size <= most:
        found = f"token {split.largest_token} of {name} or the end-of-text token {manifest.eot}"
        outside = f"is outside the vocabulary of {manifest.vocab_size}"
        raise ConfigError(f"{root}/manifest.json: {found} {outside}; {_again(root)}")


def _check_index(manifest: Manifest, root: Path, name: str) -> None:
    """Check that litdata's index lists the shards of the manifest, as plain tokens."""
    path = _file(root, f"{name}/index.json")
    try:
        index = json.loads(path.read_text())
        config = index["config"]
        listed = [_listed_shard(name, chunk) for chunk in index["chunks"]]
        expected = _plain_config(manifest, config)
        is_plain = all(config[key] == value for key, value in expected.items())
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged ({error!r:.200}); {_again(root)}") from None
    if not is_plain:
        raise ConfigError(f"{path} does not describe plain {manifest.dtype} tokens; {_again(root)}")
    shards = manifest.splits[name].shards
    if listed != [(s.file, s.bytes, s.documents, s.tokens) for s in shards]:
        raise ConfigError(f"{path} does not list the shards of manifest.json; {_again(root)}")


def _listed_shard(name: str, chunk: Mapping[str, Any]) -> tuple[str, Any, Any, Any]:
    """Return file, bytes, documents and tokens of a chunk in litdata's index."""
    file = f"{name}/{chunk['filename']}"
    return file, chunk["chunk_bytes"], chunk["chunk_size"], chunk["dim"]


def _plain_config(manifest: Manifest, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys and values of an index of uncompressed tokens."""
    expected = _PLAIN | {"data_format": DATA_FORMATS[manifest.dtype]}
    for key in config:
        if "compression" in key:
            expected[key] = None
    return expected


def _check_size(manifest: Manifest, root: Path, shard: Shard) -> None:
    """Check the bytes of a shard: number of documents, their offsets and the end (uint32), tokens."""
    path = _file(root, shard.file)
    size = path.stat().st_size
    header = 4 * (shard.documents + 2)
    expected = header + np.dtype(manifest.dtype).itemsize * shard.tokens
    if not size == shard.bytes == expected:
        found = f"{path} has {size:,} bytes; expected {expected:,}"
        raise ConfigError(f"{found}: {_again(root)}")


def _check_contents(manifest: Manifest, root: Path) -> None:
    """Hash the shards, unless the stamp in their folder is current.

    A lock in the folder and not the rank selects the process that hashes, because ranks do not know
    which nodes share a disk. Nodes that share the folder share its lock and stamp, so one hashes
    for all. Other nodes hash their copy.
    """
    # Read before hashing, to detect concurrent changes. The change time (ctime) of a copy is new,
    # and programs cannot set it. Neither holds for the modification time.
    status = {shard.file: (root / shard.file).stat() for shard in manifest.shards}
    files = {name: [state.st_size, state.st_ctime_ns] for name, state in status.items()}
    checksum = manifest.to_dict()[CHECKSUM]

    def unverified() -> list[Shard]:
        stamped: dict[str, Any] = {}
        with suppress(
            OSError, ValueError, RecursionError, LookupError, TypeError
        ):  # missing or damaged
            found = json.loads(regular(root / STAMP).read_text())
            stamped = dict(found["files"]) if found[CHECKSUM] == checksum else {}
        return [shard for shard in manifest.shards if stamped.get(shard.file) != files[shard.file]]

    def stamp(left: set[str]) -> None:
        verified = {name: state for name, state in files.items() if name not in left}
        with suppress(OSError):  # e.g. not writable
            write_atomically(root / STAMP, json.dumps({CHECKSUM: checksum, "files": verified}))

    if not unverified():
        return
    with ExitStack() as stack:
        with suppress(OSError):  # after the time-out, or if it is not writable, each process hashes
            stack.enter_context(
                locked(root / STAMP, f"process that checks {root}", timeout=_WAIT_S)
            )
        if left := unverified():
            _hash_shards(manifest, root, left, stamp)


def _hash_shards(
    manifest: Manifest, root: Path, shards: list[Shard], stamp: Callable[[set[str]], None]
) -> None:
    """Check the shards; call `stamp` with the names of those left from time to time, so that a restart continues."""
    left = {shard.file for shard in shards}
    lock = Lock()
    stamped = time.monotonic()

    def check(shard: Shard) -> int:
        path = root / shard.file
        if file_sha256(path) != shard.sha256:
            raise ConfigError(f"{path} does not match its sha256 in manifest.json; {_again(root)}")
        tokens = (
            np.memmap(path, manifest.dtype, mode="r", offset=4 * (shard.documents + 2))
            if shard.tokens
            else [0]
        )
        if (largest := np.max(tokens)) >= manifest.vocab_size:
            raise ConfigError(f"{path} has token {largest}, outside the vocabulary; {_again(root)}")
        nonlocal stamped
        with lock:
            left.remove(shard.file)
            if not left or time.monotonic() - stamped >= _STAMP_S:
                stamp(left)
                stamped = time.monotonic()
        return shard.bytes

    size = sum(shard.bytes for shard in shards)
    in_threads("checking shards", check, shards, size, shown=size > SHOWN_BYTES)


def _file(root: Path, name: str) -> Path:
    """Return a file of a corpus, which must be inside its folder, also after resolving links."""
    path = root / name
    if not path.is_file():
        raise ConfigError(f"{path} is missing; {_again(root)}")
    if not path.resolve().is_relative_to(root.resolve()):
        raise ConfigError(f"{path} is a link out of {root}; copy the file, or link the folder.")
    return path


def _again(root: Path) -> str:
    return f"delete {root} and prepare it again."
