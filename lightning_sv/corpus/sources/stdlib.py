"""Corpora of installed Python sources, available on every machine."""

import importlib.metadata as metadata
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from lightning_sv.corpus.config import CorpusConfig
from lightning_sv.corpus.sources.document import Document, Source
from lightning_sv.errors import ConfigError

# Distributions of requirements/lock.txt with a megabyte or more of Python. The list is fixed, so that a lock file
# determines the corpus; absent packages are skipped, and the manifest lists the others.
PACKAGES = (
    "fonttools", "huggingface_hub", "lightning", "litdata", "matplotlib", "mpmath", "networkx", "numpy", "pillow",
    "scipy", "sympy", "tensorboard", "torch", "torchmetrics",
)  # fmt: skip
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}


def _installed() -> list[str]:
    """Return the names of all installed distributions except this project, whose text changes often."""
    names = {str(distribution.metadata["Name"]) for distribution in metadata.distributions()}
    return sorted(name for name in names if name.replace("-", "_") != "lightning_sv")


def python_source(config: CorpusConfig) -> Source:
    """Return Python sources of the standard library and distributions, ordered by a hash of their text.

    The order mixes the packages, so that a size limit samples all of them. Empty files and files that are not
    UTF-8 are skipped. 'stdlib' has the distributions of `PACKAGES`, 'installed' has all.
    """
    paths, packages, licences = _python_files(PACKAGES if config.source == "stdlib" else _installed())
    roots = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib")]
    found: list[tuple[bytes, Path]] = []
    unreadable: set[str] = set()
    total = 0
    for path in paths:
        try:
            document = _read(path, roots)
        except UnicodeDecodeError:
            unreadable.add(str(path))
            continue
        if document.text:
            found.append((document.digest, path))
            total += document.n_bytes
    found.sort(key=lambda item: item[0][8:16])

    def read() -> Iterator[Document]:
        for digest, path in found:
            document = _read(path, roots)
            if document.digest != digest:
                raise ConfigError(f"{path}: the file changed while it was being read; prepare the corpus again.")
            yield document

    licence = "; ".join(f"{name}: {text}" for name, text in licences.items())
    return Source(read, total, licence, packages, unreadable)


def _read(path: Path, roots: Iterable[Path]) -> Document:
    """Return a file as a document, named by its path inside the environment, the same on every machine."""
    where = next((str(path.relative_to(root)) for root in roots if path.is_relative_to(root)), path.name)
    return Document.from_text(path.read_bytes().decode("utf-8-sig"), where)


def _python_files(names: Iterable[str]) -> tuple[list[Path], dict[str, str], dict[str, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    found = (path for path in sorted(root.rglob("*.py")) if path.is_file())
    paths = [path for path in found if not _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts)]
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
