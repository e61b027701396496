"""Corpora of installed Python sources, available on every machine."""

import importlib.metadata as metadata
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from lightning_sv.corpus.config import CorpusConfig
from lightning_sv.corpus.sources.document import (
    Document,
    Slice,
    Source,
)
from lightning_sv.errors import ConfigError

# Distributions of requirements/lock.txt with a megabyte or more of Python. The list is fixed, so
# that a lock file determines the corpus; absent packages are skipped, and the manifest lists the
# others.
PACKAGES = (
    "fonttools",
    "huggingface_hub",
    "lightning",
    "litdata",
    "matplotlib",
    "mpmath",
    "networkx",
    "numpy",
    "pillow",
    "scipy",
    "sympy",
    "tensorboard",
    "torch",
    "torchmetrics",
)
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}


def python_source(config: CorpusConfig, part_bytes: int) -> Source:
    """Return Python sources of the standard library and distributions, by a hash of their text.

    The order mixes the packages, so that a size limit samples all of them. Empty files and files
    that are not UTF-8 are skipped. 'stdlib' has the distributions of `PACKAGES`, 'installed' has
    all.
    """
    paths = _library_files(Path(sysconfig.get_path("stdlib")))
    versions = {"python": platform.python_version()}
    licences = ["python: PSF-2.0"]
    names = list(PACKAGES)
    if config.source == "installed":
        names = _installed()
    for name in names:
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        paths += _distribution_files(distribution)
        versions[name] = distribution.version
        licences.append(f"{name}: {_licence(distribution)}")

    slices, n_not_utf8 = _slices(paths)
    left_out = {"not UTF-8": n_not_utf8}
    return Source(slices, "; ".join(licences), versions, left_out)


def _installed() -> list[str]:
    """Return the names of all distributions except this project, whose text changes often."""
    names = {str(distribution.metadata["Name"]) for distribution in metadata.distributions()}
    names -= {"lightning-sv", "lightning_sv"}
    return sorted(names)


def _slices(paths: Iterable[Path]) -> tuple[list[Slice], int]:
    """Return a slice per file in the order of the corpus, and the number of files not UTF-8."""
    slices = []
    n_not_utf8 = 0
    for path in filter(Path.is_file, paths):
        try:
            document = _document(path)
        except UnicodeDecodeError:
            n_not_utf8 += 1
            continue
        if document is not None:
            state = document.digest.hex()
            slices.append(Slice(str(path), n_bytes=document.n_bytes, state=state))
    # by the second 8 bytes of the hash, because the first 8 decide the split
    slices.sort(key=lambda piece: piece.state[16:32])
    return slices, n_not_utf8


def read_python(piece: Slice, config: CorpusConfig) -> Iterator[Document]:
    """Yield the document of a file, which must have its hash of the first reading."""
    document = _document(Path(piece.name))
    if document is None or document.digest.hex() != piece.state:
        found = f"{piece.name}: the file changed while it was being read"
        raise ConfigError(f"{found}; prepare the corpus again.")
    yield document


def _document(path: Path) -> Document | None:
    """Return a file as a document; None if it is empty."""
    text = path.read_bytes().decode("utf-8-sig")
    return Document.from_text(text, str(path)) if text else None


def _library_files(root: Path) -> list[Path]:
    """Return the Python files of the standard library, without installed packages."""
    paths = []
    for path in sorted(root.rglob("*.py")):
        folders = path.relative_to(root).parts
        if _SKIPPED_FOLDERS.isdisjoint(folders):
            paths.append(path)
    return paths


def _distribution_files(distribution: metadata.Distribution) -> list[Path]:
    paths = []
    for file in distribution.files or []:
        if file.suffix == ".py":
            paths.append(Path(str(file.locate())))
    return sorted(paths)


def _licence(distribution: metadata.Distribution) -> str:
    """Return the licence that a distribution declares in a line; some declare its full text."""
    fields = distribution.metadata
    texts = [*fields.get_all("License-Expression", []), *fields.get_all("License", [])]
    for classifier in fields.get_all("Classifier", []):
        if classifier.startswith("License ::"):
            texts.append(classifier.rpartition(" :: ")[2])
    for text in texts:
        is_name = text and "\n" not in text
        if is_name:
            return text
    return "see its own licence file"
