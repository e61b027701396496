"""Corpora in object stores: downloaded once per node, then read like a local folder.

Every optimizer step reads sequences from all shards in random order. Therefore the shards are
copied before the first step, with the checks of a local corpus, and not streamed.
"""

import os
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from lightning_sv.atomic import atomic_path, file_sha256, locked, write_atomically
from lightning_sv.corpus.manifest import FILENAME, SPLITS, Manifest, Shard
from lightning_sv.corpus.progress import in_threads
from lightning_sv.corpus.tokenizer import Tokenizer
from lightning_sv.errors import ConfigError, expect_known

SCHEMES = ("s3", "gs", "azure", "r2")


def is_remote(dir: str | Path) -> bool:
    """Return True if `dir` is the address of an object store, such as s3://bucket/corpus."""
    return "://" in str(dir)


def local_folder(dir: str | Path) -> Path:
    """Return the folder of a corpus; an address such as s3://bucket/corpus is downloaded first.

    The copy is in $LIGHTNING_SV_CACHE, or ~/.cache/lightning_sv, in a folder named after the corpus
    and its hash. Later runs use it again. Credentials are those that the client of the store finds,
    e.g. AWS_ACCESS_KEY_ID.

    Args:
        dir: a folder, or an address of one of `SCHEMES`

    Raises:
        ConfigError: the scheme is unknown, the address has no corpus, or a file does not match the
            manifest
    """
    if is_remote(dir):
        return _download(str(dir).rstrip("/"))
    return Path(dir).expanduser()


@lru_cache
def _download(url: str) -> Path:
    scheme, _, name = url.partition("://")
    expect_known("data.corpus.dir: scheme", scheme, SCHEMES)
    folder_of_caches = os.environ.get("LIGHTNING_SV_CACHE", "~/.cache/lightning_sv")
    cache = Path(folder_of_caches).expanduser() / "corpora"
    cache.mkdir(parents=True, exist_ok=True)
    # Imported here, because litdata imports many cloud clients.
    from litdata.streaming.downloader import get_downloader

    store = get_downloader(url, str(cache), [])
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        _fetch(store, url, FILENAME, Path(temporary))
        manifest = Manifest.load(temporary)
        text = (Path(temporary) / FILENAME).read_text()
    folder = cache / f"{name.rpartition('/')[2]}-{manifest.corpus_hash[:12]}"
    # one process per node downloads while the others wait
    with locked(folder, f"download of {url}"):
        if not (folder / FILENAME).is_file():
            _fetch_all(store, url, manifest, folder)
            write_atomically(folder / FILENAME, text)  # last: a folder with a manifest is complete
    return folder


def _fetch_all(store: Any, url: str, manifest: Manifest, folder: Path) -> None:
    for split in SPLITS:
        _fetch(store, url, f"{split}/index.json", folder)
    tokenizer = manifest.tokenizer_file
    _fetch_checked(store, url, tokenizer, manifest.tokenizer_sha256, folder)
    # The manifest does not list the file that names the end token.
    Tokenizer((folder / tokenizer).read_bytes(), url, manifest.eot).save(folder)

    def fetch(shard: Shard) -> int:
        _fetch_checked(store, url, shard.file, shard.sha256, folder)
        return shard.bytes

    shards = manifest.shards
    in_threads("downloading", fetch, shards, sum(shard.bytes for shard in shards))


def _fetch_checked(store: Any, url: str, name: str, sha256: str, folder: Path) -> None:
    """Download a file, unless a download that was interrupted left it, and check its hash."""
    path = folder / name
    if not path.is_file():
        _fetch(store, url, name, folder)
    if file_sha256(path) != sha256:
        path.unlink()
        found = f"{url}/{name} does not match its sha256 in {FILENAME}"
        raise ConfigError(f"{found}; copy the corpus there again.")


def _fetch(store: Any, url: str, name: str, folder: Path) -> None:
    try:
        # download_fileobj and not download_file, which starts a thread pool that forked loader
        # processes cannot use.
        with atomic_path(folder / name) as path, path.open("wb") as file:
            store.download_fileobj(f"{url}/{name}", file)
    except Exception as error:  # each store's client has errors of its own
        found = f"{url}, whose {name} cannot be read ({type(error).__name__}: {error})"
        expected = "the address of a folder written by lightning-sv prepare. Check the credentials."
        raise ConfigError(f"data.corpus.dir is {found}; expected {expected}") from error
