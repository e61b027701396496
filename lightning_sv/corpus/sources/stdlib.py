"""Corpora of installed Python sources, available on every machine."""

import importlib.metadata as metadata
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lightning_sv.corpus.config import CorpusConfig
from lightning_sv.corpus.sources.document import (
    BYTE_ORDER_MARK,
    Document,
    NotUtf8Error,
    Slice,
    Source,
    decoded,
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


def _installed() -> list[str]:
    """Return the names of all distributions except this project, whose text changes often."""
    names = {str(distribution.metadata["Name"]) for distribution in metadata.distributions()}
    names -= {"lightning-sv", "lightning_sv"}
    return sorted(names)


def python_source(config: CorpusConfig, previous: Source | None, part_bytes: int) -> Source:
    """Return Python sources of the standard library and distributions, by a hash of their text.

    The order mixes the packages, so that a size limit samples all of them. Empty files and files
    that are not UTF-8 are skipped. 'stdlib' has the distributions of `PACKAGES`, 'installed' has
    all.
    """
    names = PACKAGES if config.source == "stdlib" else _installed()
    library = Library.installed(names)
    reader = PythonReader(config)
    slices = []
    n_not_utf8 = 0
    for path in library.paths:
        try:
            document = reader.document(path)
        except NotUtf8Error:
            n_not_utf8 += 1
            continue
        if document is not None:
            state = document.digest.hex()
            slices.append(Slice(str(path), n_bytes=document.n_bytes, state=state))
    slices.sort(key=_place)

    licence = "; ".join(f"{name}: {text}" for name, text in library.licences.items())
    left_out = {"not UTF-8": n_not_utf8}
    return Source(slices, reader, licence, library.versions, left_out)


def _place(piece: Slice) -> str:
    """Sort key of the files: the second 8 bytes of the hash; the first 8 decide the split."""
    return piece.state[16:32]


class PythonReader:
    """Reader of installed Python files.

    A file is named by its path inside the environment, which is the same on every machine.
    """

    def __init__(self, config: CorpusConfig) -> None:
        self.roots = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib")]

    def read(self, piece: Slice) -> Iterator[Document]:
        """Yield the document of a file, which must have its hash of the first reading."""
        document = None
        with suppress(NotUtf8Error):
            document = self.document(Path(piece.name))
        if document is None or document.digest.hex() != piece.state:
            found = f"{piece.name}: the file changed while it was being read"
            raise ConfigError(f"{found}; prepare the corpus again.")
        yield document

    def document(self, path: Path) -> Document | None:
        """Return a file as a document; None if it is empty.

        Raises:
            NotUtf8Error: the file is not UTF-8
        """
        text = decoded(path.read_bytes(), str(path)).removeprefix(BYTE_ORDER_MARK)
        if not text:
            return None
        return Document.from_text(text, self._inside(path))

    def _inside(self, path: Path) -> str:
        """Return the path inside the environment."""
        for root in self.roots:
            if path.is_relative_to(root):
                return str(path.relative_to(root))
        return path.name


@dataclass
class Library:
    """Python files of the standard library and of distributions.

    Attributes:
        paths: the files
        versions: versions of Python and of each distribution
        licences: their licences
    """

    paths: list[Path]
    versions: dict[str, str]
    licences: dict[str, str]

    @classmethod
    def installed(cls, names: Iterable[str]) -> "Library":
        """Return the files of Python and of those of the distributions that are installed."""
        paths = _library_files(Path(sysconfig.get_path("stdlib")))
        library = cls(paths, {"python": platform.python_version()}, {"python": "PSF-2.0"})
        for name in names:
            try:
                distribution = metadata.distribution(name)
            except metadata.PackageNotFoundError:
                continue
            library.paths += _distribution_files(distribution)
            library.versions[name] = distribution.version
            library.licences[name] = _licence(distribution)
        return library


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
    """Return the licence that a distribution declares in a line."""
    fields = distribution.metadata
    declared = [
        *fields.get_all("License-Expression", []),
        *fields.get_all("License", []),
        *_licence_classifiers(fields.get_all("Classifier", [])),
    ]
    names = filter(_is_name, map(str.strip, declared))
    return next(names, "see its own licence file")


def _is_name(text: str) -> bool:
    """Return True for the name of a licence; some distributions declare its full text."""
    return text != "" and len(text) <= 120 and "\n" not in text


def _licence_classifiers(classifiers: Iterable[str]) -> Iterator[str]:
    for classifier in classifiers:
        if classifier.startswith("License ::"):
            yield classifier.rpartition(" :: ")[2]
