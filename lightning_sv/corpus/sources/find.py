"""Files of a list of paths, folders and globs, and counts of the files left out."""

import glob
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from lightning_sv.errors import ConfigError

#: kinds of entries left out of a folder, besides suffixes
LINKS, CLOSED, SPECIAL = "links", "folders without permission", "special files"


def find_files(spec: str, reads: Callable[[Path], bool], known: str) -> tuple[list[Path], Counter[str]]:
    """Return the files of a source in order, each once, and the number left out per kind.

    Args:
        spec: path, or paths and globs separated by commas
        reads: predicate of supported files in a folder or glob
        known: supported suffixes, for errors

    Raises:
        ConfigError: a part of `spec` matches no file
    """
    single = Path(spec.strip()).expanduser()  # a path may contain a comma
    parts = [spec.strip()] if os.path.exists(single) else [part.strip() for part in spec.split(",")]  # noqa: PTH110 (Path.exists raises for a list that is longer than a path)
    paths: dict[Path, None] = {}
    left_out: Counter[str] = Counter()
    for part in filter(None, parts):
        target = Path(part).expanduser()
        if target.is_file():
            paths[target] = None
            continue
        names = [target] if target.is_dir() else map(Path, glob.glob(str(target), recursive=True))  # noqa: PTH207
        files, skipped = set(), Counter[str]()
        for name in names:
            for path in _walk(name, skipped) if name.is_dir() else [name]:
                if not path.is_file():
                    skipped[SPECIAL if path.exists() else LINKS] += 1
                elif reads(path):
                    files.add(path)
                else:
                    skipped[_kind(path)] += 1
        if not files:
            rest = f" (left out: {counted(skipped)})" if skipped else ""
            raise ConfigError(
                f"source=files:{part} matches no file{rest}; expected one of the suffixes {known}. Check the path."
            )
        paths.update(dict.fromkeys(sorted(files)))
        left_out += skipped
    return list(paths), left_out


def counted(left_out: dict[str, int]) -> str:
    """Return a phrase with the numbers of files left out, the most frequent kinds first."""
    kinds = sorted(
        ((kind, number) for kind, number in left_out.items() if number), key=lambda each: (-each[1], each[0])
    )
    return ", ".join(f"{kind} {number:,}" for kind, number in kinds[:8]) + (", ..." if len(kinds) > 8 else "")


def _walk(top: Path, skipped: Counter[str]) -> Iterator[Path]:
    """Yield the files of a folder; links to folders are followed once, hidden names skipped."""
    seen: set[tuple[int, int]] = set()
    pending, links = [top], list[Path]()
    while pending or links:
        folder = pending.pop() if pending else links.pop(0)
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
            if path.is_dir() if is_link else entry.is_dir():  # Path.is_dir() does not raise for a loop of links
                (links if is_link else pending).append(path)
            else:
                yield path


def _kind(path: Path) -> str:
    suffixes = path.suffixes[-2:]
    if len(suffixes) == 2 and suffixes[1].lower() not in (".gz", ".zst", ".bz2", ".xz"):
        del suffixes[0]
    return "".join(suffixes) or "no suffix"
