"""Files that the paths of a source name: files and folders."""

import fnmatch
import os
from pathlib import Path

_VISIBLE = "[!.]*"


def named_paths(location: str) -> list[str]:
    """Split a list of paths at its commas, unless it is one path with commas in its name."""
    single = os.path.expanduser(location.strip())  # noqa: PTH111
    # Path.exists would raise for a list that is longer than a path
    if os.path.exists(single):  # noqa: PTH110
        return [single]
    parts = map(str.strip, location.split(","))
    return list(filter(None, parts))


def reached_files(target: Path) -> list[Path]:
    """Return a file, or the files in a folder and in those below it, sorted; none without either.

    Links to folders are followed once, hidden names are skipped.
    """
    if target.is_file():
        return [target]
    if not target.is_dir():
        return []

    files: list[Path] = []
    seen: set[str] = set()
    for path, subfolders, names in os.walk(target, followlinks=True, onerror=_refuse):
        real = os.path.realpath(path)
        if real in seen:
            subfolders.clear()
            continue
        seen.add(real)
        subfolders[:] = sorted(fnmatch.filter(subfolders, _VISIBLE))  # os.walk goes on with these
        files += [Path(path, name) for name in fnmatch.filter(names, _VISIBLE)]
    return sorted(files)


def _refuse(error: OSError) -> None:
    raise error  # os.walk would skip the folder
