"""Files of a list of paths, folders and globs, and counts of the files left out."""

import glob
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from lightning_sv.errors import ConfigError

#: kinds of what is left out of a folder, besides suffixes
LINKS, CLOSED, SPECIAL = "links", "folders without permission", "special files"


def find_files(spec: str, reads: Callable[[Path], bool], known: str) -> tuple[list[Path], Counter[str]]:
    """Return the files of a source in order, each once, and the number left out per kind.

    Args:
        spec: path, or paths and globs separated by commas
        reads: whether there is a reader for a file of a folder or glob
        known: suffixes that are read, for errors

    Raises:
        ConfigError: a part of `spec` gives no file
    """
    whole = Path(spec.strip()).expanduser()  # its name may hold a comma
    parts = [spec.strip()] if os.path.exists(whole) else [part.strip() for part in spec.split(",")]  # noqa: PTH110 (Path.exists raises for a list that is longer than a path)
    paths: dict[Path, None] = {}
    left_out: Counter[str] = Counter()
    for part in filter(None, parts):
        target = Path(part).expanduser()
        if target.is_file():
            paths[target] = None
            continue
        names = [target] if target.is_dir() else map(Path, glob.glob(str(target), recursive=True))  # noqa: PTH207
        found, skipped = set(), Counter[str]()
        for name in names:
            for path in _walk(name, skipped) if name.is_dir() else [name]:
                if not path.is_file():
                    skipped[SPECIAL if path.exists() else LINKS] += 1
                elif reads(path):
                    found.add(path)
                else:
                    skipped[_kind(path)] += 1
        if not found:
            rest = f" (left out: {counted(skipped)})" if skipped else ""
            raise ConfigError(
                f"source=files:{part} matches no file with one of the suffixes {known}{rest}; check the path."
            )
        paths.update(dict.fromkeys(sorted(found)))
        left_out += skipped
    return list(paths), left_out


def counted(left_out: dict[str, int]) -> str:
    """Return one phrase on what is left out, the most frequent kinds first."""
    kinds = sorted(
        ((kind, number) for kind, number in left_out.items() if number), key=lambda each: (-each[1], each[0])
    )
    return ", ".join(f"{kind} {number:,}" for kind, number in kinds[:8]) + (", ..." if len(kinds) > 8 else "")


def _walk(top: Path, skipped: Counter[str]) -> Iterator[Path]:
    """Yield what a folder holds; links to folders are followed once, hidden names left out."""
    seen: set[tuple[int, int]] = set()
    waiting, links = [top], list[Path]()
    while waiting or links:
        folder = waiting.pop() if waiting else links.pop(0)
        try:
            status = folder.stat()
            if (key := (status.st_dev, status.st_ino)) in seen:
                skipped[LINKS] += 1
                continue
            seen.add(key)
            with os.scandir(folder) as entries:
                named = sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda e: e.name)
        except PermissionError:
            skipped[CLOSED] += 1
            continue
        for entry in named:
            path, is_link = folder / entry.name, entry.is_symlink()
            if path.is_dir() if is_link else entry.is_dir():  # Path's bears a loop of links
                (links if is_link else waiting).append(path)
            else:
                yield path


def _kind(path: Path) -> str:
    """Return the suffix of a file as it is spelt, with the compression's."""
    suffixes = path.suffixes[-2:]
    if len(suffixes) == 2 and suffixes[1].lower() not in (".gz", ".zst", ".bz2", ".xz"):
        del suffixes[0]
    return "".join(suffixes) or "no suffix"
