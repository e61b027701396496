"""Identity of a source's text, for detecting later changes."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lightning_sv.atomic import file_sha256

#: name of a file, package or dataset -> bytes, mtime_ns and sha256; version; or revision
State = dict[str, dict[str, Any]]
_FILE = {"bytes", "mtime_ns"}


def file_states(paths: Iterable[Path]) -> State:
    """Return sizes and modification times of files."""
    return {
        str(path): {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
        for path in paths
        for status in (path.stat(),)
    }


def file_bytes(state: State) -> int:
    """Return the total size of the files in a state."""
    return sum(entry.get("bytes", 0) for entry in state.values())


def hashed(state: State, advance: Callable[[int], None]) -> State:
    """Return a state with the hashes of its files, which distinguish a copy or a touch from a change."""
    complete = dict(state)
    for name, entry in state.items():
        if entry.keys() >= _FILE:
            complete[name] = entry | {"sha256": file_sha256(Path(name))}
            advance(entry["bytes"])
    return complete


def differences(then: State, now: State) -> list[str]:
    """Return a phrase per file, package or dataset that is new, gone or changed.

    Args:
        then: state recorded by `prepare`, with hashes
        now: current state, without hashes; a file is hashed only if its time alone differs
    """
    phrases = []
    for name in sorted(then.keys() | now.keys()):
        before, after = then.get(name), now.get(name)
        if before is None or after is None:
            known = before or after or {}
            if "revision" not in known:  # the hub was not asked
                phrases.append(f"{name} is {'gone' if after is None else 'new'}")
        elif not _same(name, before, after):
            value = next((f": {before[key]}, now {after[key]}" for key in ("version", "revision") if key in after), "")
            phrases.append(f"{name} has changed{value}")
    return phrases


def _same(name: str, before: dict[str, Any], after: dict[str, Any]) -> bool:
    if all(before.get(key) == value for key, value in after.items()):
        return True
    if before.get("bytes") != after.get("bytes", -1):
        return False
    return before.get("sha256") == file_sha256(Path(name))
