"""Files of a list of paths, folders and globs, and counts of the files left out."""

import glob
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from lightning_sv.errors import ConfigError


def find_files(spec: str, reads: Callable[[Path], bool], known: str) -> tuple[list[Path], Counter[str]]:
    """Return the files of a source in order, each once, and the number left out per suffix.

    Args:
        spec: path, or paths and globs separated by commas
        reads: predicate of supported files in a folder or glob
        known: supported suffixes, for errors

    Raises:
        ConfigError: a part of `spec` matches no file
    """
    given = os.path.expanduser(spec.strip())  # noqa: PTH111
    # A path may contain a comma. Path.exists would raise for a list that is longer than a path.
    parts = [given] if os.path.exists(given) else [part.strip() for part in spec.split(",")]  # noqa: PTH110
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
            for path in _walk(name) if name.is_dir() else [name]:
                if path.is_file() and reads(path):
                    files.add(path)
                else:
                    skipped["".join(path.suffixes[-2:]) or "no suffix"] += 1
        if not files:
            rest = f" (skipped: {counted(skipped)})" if skipped else ""
            raise ConfigError(
                f"source is files:{part}, which matches no file{rest}; expected the suffixes {known}. Check the path."
            )
        paths.update(dict.fromkeys(sorted(files)))
        left_out += skipped
    return list(paths), left_out


def counted(left_out: dict[str, int]) -> str:
    """Return a phrase with the numbers of files left out, the most frequent kinds first."""
    kinds = Counter(left_out).most_common()
    phrases = [f"{kind} {number:,}" for kind, number in kinds[:8] if number]
    return ", ".join(phrases) + (", ..." if len(kinds) > 8 else "")


def _walk(top: Path) -> Iterator[Path]:
    """Yield the files of a folder; links to folders are followed once, hidden names skipped."""
    seen: set[str] = set()
    for folder, folders, files in os.walk(top, followlinks=True):
        if (real := os.path.realpath(folder)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(folder) / name for name in files if not name.startswith("."))
