"""Corpora of installed Python sources, available on every machine."""

import importlib.metadata as metadata
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from lightning_sv.corpus.config import CorpusConfig
from lightning_sv.corpus.sources.document import Document, Slice, Source
from lightning_sv.errors import ConfigError

# Distributions of requirements/lock.txt with a megabyte or more of Python. The list is fixed, so
# that a lock file determines the corpus; absent packages are skipped, and the manifest lists the
# others.
PACKAGES = (
    "fonttools", "huggingface_hub", "lightning", "litdata", "matplotlib", "mpmath", "networkx", "numpy", "pillow",
    "scipy", "sympy", "tensorboard", "torch", "torchmetrics",
)  # fmt: skip
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}


def _installed() -> list[str]:
    """Return the names of all installed distributions except this project, whose text changes often."""
    names = {str(distribution.metadata["Name"]) for distribution in metadata.distributions()}
    return sorted(name for name in names if name.replace("-", "_") != "lightning_sv")


def python_source(config: CorpusConfig, previous: Source | None, part_bytes: int) -> Source:
    """Return Python sources of the standard library and distributions, ordered by a hash of their text.

    The order mixes the packages, so that a size limit samples all of them. Empty files and files
    that are not UTF-8 are skipped. 'stdlib' has the distributions of `PACKAGES`, 'installed' has
    all.
    """
    paths, packages, licences = _python_files(
        PACKAGES if config.source == "stdlib" else _installed()
    )
    reader = PythonReader(config)
    found: list[tuple[bytes, Slice]] = []
    for path in paths:
        document = reader.document(path)
        if document is not None:
            digest = document.digest
            found.append(
                (digest[8:16], Slice(str(path), n_bytes=document.n_bytes, state=digest.hex()))
            )
    found.sort(key=lambda item: item[0])

    slices = [piece for _, piece in found]
    licence = "; ".join(f"{name}: {text}" for name, text in licences.items())
    return Source(slices, reader, licence, packages, unreadable=len(reader.unreadable))


class PythonReader:
    """Reader of installed Python files, each named by its path inside the environment, as on every machine."""

    def __init__(self, config: CorpusConfig) -> None:
        self.roots = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib")]
        self.unreadable: set[str] = set()

    def read(self, piece: Slice) -> Iterator[Document]:
        """Yield the document of a file, which must have its hash of the first reading."""
        document = self.document(Path(piece.name))
        if document is None or document.digest.hex() != piece.state:
            raise ConfigError(
                f"{piece.name}: the file changed while it was being read; prepare the corpus again."
            )
        yield document

    def document(self, path: Path) -> Document | None:
        """Return a file as a document; None if it is empty or not UTF-8."""
        inside = (path.relative_to(root) for root in self.roots if path.is_relative_to(root))
        where = str(next(inside, path.name))
        try:
            text = path.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError:
            self.unreadable.add(str(path))
            return None
        return Document.from_text(text, where) if text else None


def _python_files(names: Iterable[str]) -> tuple[list[Path], dict[str, str], dict[str, str]]:
    """Return the files of Python and of distributions, their versions, and their licences."""
    paths = _library_files(Path(sysconfig.get_path("stdlib")))
    packages = {"python": platform.python_version()}
    licences = {"python": "PSF-2.0"}
    for name in names:
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        paths += _distribution_files(distribution)
        packages[name] = distribution.version
        licences[name] = _licence(distribution)
    return paths, packages, licences


def _library_files(root: Path) -> list[Path]:
    """Return the Python files of the standard library, without installed packages."""
    paths = []
    for path in sorted(root.rglob("*.py")):
        is_skipped = _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts)
        if path.is_file() and not is_skipped:
            paths.append(path)
    return paths


def _distribution_files(distribution: metadata.Distribution) -> list[Path]:
    paths = []
    for file in distribution.files or ():
        path = Path(str(file.locate()))
        if file.suffix == ".py" and path.is_file():
            paths.append(path)
    return sorted(paths)


def _licence(distribution: metadata.Distribution) -> str:
    """Return the licence that a distribution declares, if short: some put the full text in the field."""
    fields = distribution.metadata
    for key in ("License-Expression", "License"):
        if key in fields:
            text = fields[key].strip()
            is_short = len(text) <= 120 and "\n" not in text
            if text and is_short:
                return text
            break
    for line in fields.get_all("Classifier") or []:
        if line.startswith("License ::"):
            return line.split(" :: ")[-1]
    return "see its own licence file"
