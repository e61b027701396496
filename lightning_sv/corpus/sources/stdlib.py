"""Corpora of installed Python sources, available on every machine."""

import codecs
import importlib.metadata as metadata
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from lightning_sv.corpus.progress import phase
from lightning_sv.corpus.sources.document import Document, Source, digest, order_key
from lightning_sv.corpus.sources.state import State
from lightning_sv.errors import ConfigError

# Distributions of requirements/lock.txt with a megabyte or more of Python. The list is fixed, so that a lock file
# determines the corpus; absent packages are skipped, and the manifest lists the others.
PACKAGES = (
    "fonttools", "huggingface_hub", "lightning", "litdata", "matplotlib", "mpmath", "networkx", "numpy", "pillow",
    "scipy", "sympy", "tensorboard", "torch", "torchmetrics",
)  # fmt: skip
# 75 MB of the 160 MB that these hold: about 30 M training tokens of a 1,024 BPE.
DEFAULT_MAX_BYTES = 75_000_000
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}


def package_states(source: str) -> State:
    """Return the versions of Python and of the packages of 'stdlib' or 'installed'."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES if source == "stdlib" else _installed():
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {name: {"version": version} for name, version in versions.items()}


def _installed() -> list[str]:
    """Return the names of all installed distributions except this project, whose text changes often."""
    names = {str(distribution.metadata["Name"]) for distribution in metadata.distributions()}
    return sorted(name for name in names if name.replace("-", "_") != "lightning_sv")


def python_source(source: str, max_bytes: int | None, shown: bool) -> Source:
    """Return Python sources of the standard library and distributions, ordered by a hash of their text.

    The order mixes the packages, so that a size limit samples all of them. Empty files and files that are not
    UTF-8 are skipped. 'stdlib' has the distributions of `PACKAGES` and a default limit, 'installed' has all.
    """
    if source == "stdlib":
        max_bytes = max_bytes or DEFAULT_MAX_BYTES
    paths, packages, licences = _python_files(PACKAGES if source == "stdlib" else _installed())
    path_of: dict[bytes, Path] = {}
    sizes: dict[bytes, int] = {}
    unreadable: set[str] = set()
    duplicates = 0
    with phase("reading sources", len(paths), "files", shown=shown) as step, ThreadPoolExecutor() as pool:
        for path, (key, size, is_text) in zip(paths, pool.map(_examine, paths), strict=True):
            step(1)
            if not size or key in path_of:
                duplicates += bool(size)
            elif not is_text:
                unreadable.add(str(path))
            else:
                path_of[key], sizes[key] = path, size
    keys: list[bytes] = []
    total = 0
    for key in sorted(path_of, key=order_key):
        if max_bytes is not None and total + sizes[key] > max_bytes:
            break
        keys.append(key)
        total += sizes[key]

    def read() -> Iterator[Document]:
        for key in keys:
            raw = _read(path_of[key])
            if digest(raw) != key:
                raise ConfigError(
                    f"{path_of[key]}: the file changed while it was being read; prepare the corpus again."
                )
            yield Document(raw.decode("utf-8"), len(raw), key, _where(path_of[key]))

    licence = "; ".join(f"{name}: {text}" for name, text in licences.items())
    return Source(read, total, licence, packages, duplicates, unreadable)


def _where(path: Path) -> str:
    """Return the path of a file inside the environment, the same on every machine."""
    roots = (Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib"))
    return next((str(path.relative_to(root)) for root in roots if path.is_relative_to(root)), path.name)


def _read(path: Path) -> bytes:
    return path.read_bytes().removeprefix(codecs.BOM_UTF8)


def _examine(path: Path) -> tuple[bytes, int, bool]:
    """Return the digest and size of a file, and whether it is UTF-8."""
    raw = _read(path)
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return digest(raw), len(raw), False
    return digest(raw), len(raw), True


def _python_files(names: Iterable[str]) -> tuple[list[Path], dict[str, str], dict[str, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = [
        path
        for path in sorted(root.rglob("*.py"))
        if path.is_file() and not _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts)
    ]
    packages = {"python": platform.python_version()}
    licences = {"python": "PSF-2.0"}
    for name in names:
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        files = [Path(str(file.locate())) for file in distribution.files or () if file.suffix == ".py"]
        paths += sorted(path for path in files if path.is_file())
        packages[name] = distribution.version
        licences[name] = _licence(distribution)
    return paths, packages, licences


def _licence(distribution: metadata.Distribution) -> str:
    """Return the licence that a distribution declares, if short: some put the full text in the field."""
    fields = distribution.metadata
    declared = (fields[key] for key in ("License-Expression", "License") if key in fields)
    text = next(declared, "").strip()
    if text and len(text) <= 120 and "\n" not in text:
        return text
    classifiers = [line for line in fields.get_all("Classifier") or [] if line.startswith("License ::")]
    return classifiers[0].split(" :: ")[-1] if classifiers else "see its own licence file"
