"""Files that the paths of a source name: files, folders and globs."""

import glob
import os
from collections.abc import Iterator
from pathlib import Path


def named_paths(location: str) -> list[str]:
    """Split a list of paths at its commas, unless it is one path with commas in its name."""
    single = os.path.expanduser(location.strip())  # noqa: PTH111
    # Path.exists would raise for a list that is longer than a path
    if os.path.exists(single):  # noqa: PTH110
        return [single]
    parts = map(str.strip, location.split(","))
    return list(filter(None, parts))


def reached_files(target: Path) -> list[Path]:
    """Return the files in a folder, or those that a glob matches, sorted.

    A file that links to folders reach by several paths is returned once, by the first of them.
    """
    first_paths: dict[tuple[str, str], Path] = {}
    for path in sorted(_reached(target)):
        place = (os.path.realpath(path.parent), path.name)
        first_paths.setdefault(place, path)
    return list(first_paths.values())


def _reached(target: Path) -> Iterator[Path]:
    roots = [target] if target.is_dir() else _matches(target)
    for root in roots:
        if not root.is_dir():
            yield root
            continue
        for folder, names in _folders(root):
            for name in names:
                yield folder / name


def _matches(pattern: Path) -> Iterator[Path]:
    """Yield the paths that match a glob.

    `**` follows a link to a folder once, where glob.glob follows loops.
    """
    parts = pattern.parts
    while parts[-1:] == ("**",):  # all files of a folder
        parts = parts[:-1]
    if "**" not in parts:
        yield from _glob(Path(*parts))
        return
    first = parts.index("**")
    rest = parts[first + 1 :]
    for top in _glob(Path(*parts[:first])):
        for folder, _ in _folders(top):
            escaped = glob.escape(str(folder))
            yield from _matches(Path(escaped, *rest))


def _glob(pattern: Path) -> Iterator[Path]:
    return map(Path, glob.glob(str(pattern)))  # noqa: PTH207


def _folders(top: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield a folder and those in it, each with the names of its files.

    Links to folders are followed once, hidden names are skipped.
    """
    seen: set[str] = set()
    for folder, subfolders, files in os.walk(top, followlinks=True, onerror=_refuse):
        real = os.path.realpath(folder)
        if real in seen:
            subfolders.clear()
            continue
        seen.add(real)
        subfolders[:] = _visible(subfolders)  # os.walk goes on with these
        yield Path(folder), _visible(files)


def _visible(names: list[str]) -> list[str]:
    return sorted(name for name in names if not name.startswith("."))


def _refuse(error: OSError) -> None:
    raise error  # os.walk would skip the folder
