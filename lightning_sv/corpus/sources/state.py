"""Detection of changes in the files of a corpus's text."""

from pathlib import Path
from typing import Any

from lightning_sv.atomic import file_sha256
from lightning_sv.corpus.config import CorpusConfig
from lightning_sv.corpus.manifest import Manifest
from lightning_sv.corpus.sources.files import source_files


def file_states(config: CorpusConfig) -> dict[str, dict[str, Any]]:
    """Return size, modification time and hash of each file of a source of files; empty for other sources."""
    if not config.source.startswith("files:"):
        return {}
    return {str(path): _times(path) | {"sha256": file_sha256(path)} for path in source_files(config)[0]}


def changed_text(manifest: Manifest) -> str:
    """Return a phrase that names files that were added, removed or changed since the preparation; empty for none.

    Only sources of files are compared, if any of their files still exists here.
    """
    then = manifest.sources
    if not then or not manifest.source.startswith("files:"):
        return ""
    try:
        found = source_files(CorpusConfig(**manifest.settings))[0]
    except (TypeError, ValueError, OSError):  # some text no longer exists
        found = [path for path in map(Path, then) if path.is_file()]
    now = {str(path): path for path in found}
    phrases = []
    for name in sorted(then.keys() | now.keys()) if now else ():
        if name not in then or name not in now:
            phrases.append(f"{name} is {'new' if name in now else 'gone'}")
        elif not _same(now[name], then[name]):
            phrases.append(f"{name} has changed")
    more = f", and {len(phrases) - 3:,} more" if len(phrases) > 3 else ""
    return ", ".join(phrases[:3]) + more


def _times(path: Path) -> dict[str, Any]:
    status = path.stat()
    return {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns}


def _same(path: Path, then: dict[str, Any]) -> bool:
    """Return True if a file is unchanged; it is hashed only if its time alone differs, as after a copy."""
    now = _times(path)
    if now.items() <= then.items():
        return True
    return now["bytes"] == then.get("bytes") and file_sha256(path) == then.get("sha256")
