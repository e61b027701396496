"""Documents from files on disk, and changes of the files since a corpus was prepared from them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from lightning_sv.atomic import file_sha256
from lightning_sv.corpus.config import CorpusConfig
from lightning_sv.corpus.manifest import Manifest
from lightning_sv.corpus.progress import in_threads
from lightning_sv.corpus.sources.document import (
    FileStates,
    Slice,
    Source,
    file_times,
    is_untouched,
)
from lightning_sv.corpus.sources.formats import READERS, file_slices, suffixes
from lightning_sv.corpus.sources.paths import named_paths, reached_files
from lightning_sv.errors import ConfigError

_HINT = "Check the path, or convert the files; rename .json files of JSON lines to .jsonl."


def files_source(config: CorpusConfig, part_bytes: int) -> Source:
    """Return the documents of files and folders, in the order of their names.

    A file of lines or row groups that is larger than `part_bytes` has several slices.
    """
    paths, left_out = source_files(config.location)
    states = file_states(paths, known={})
    slices: list[Slice] = []
    for path in paths:
        slices += file_slices(path, states[str(path)]["sha256"], config.text_field, part_bytes)
    return Source(slices, left_out=dict(left_out), files=states)


def source_files(location: str) -> tuple[list[Path], dict[str, int]]:
    """Return the files that `files:LOCATION` names in order, and the number left out per suffix."""
    paths: dict[Path, None] = {}
    left_out = Counter[str]()
    for name in named_paths(location):
        reached = reached_files(Path(name).expanduser())
        files = list(filter(_is_read, reached))
        left_out.update(map(_suffixes, set(reached).difference(files)))
        if not files:
            found = f"files:{name}, which names no file that is read"
            expected = f"the suffixes {', '.join(READERS)}"
            raise ConfigError(f"source is {found}; expected {expected}. {_HINT}")
        paths.update(dict.fromkeys(files))
    return list(paths), left_out


def _is_read(path: Path) -> bool:
    suffix, _ = suffixes(path)
    return suffix in READERS and path.is_file()


def _suffixes(path: Path) -> str:
    return "".join(path.suffixes[-2:]) or "no suffix"


def counted(left_out: Mapping[str, int]) -> str:
    """Return a phrase with the numbers of files left out, the most frequent kinds first.

    It is empty if none is left out.

    >>> counted({".pdf": 2, ".png": 1200, ".zip": 0})
    '.png 1,200, .pdf 2'
    """
    kinds = (+Counter(left_out)).most_common()  # + removes counts of 0
    return ", ".join(f"{kind} {number:,}" for kind, number in kinds)


def file_states(paths: Sequence[Path], known: FileStates) -> FileStates:
    """Return size, modification time and hash of each file.

    A `known` file of equal size and time keeps its hash.
    """
    states: FileStates = {}

    def add_state(path: Path) -> int:
        name = str(path)
        states[name] = known.get(name, {})
        if not is_untouched(path, states[name]):
            states[name] = file_times(path) | {"sha256": file_sha256(path)}
        return int(states[name]["bytes"])

    total = sum(path.stat().st_size for path in paths)
    in_threads("hashing text", add_state, paths, total)
    return states


def changed_file(manifest: Manifest) -> str | None:
    """Return the first file that was added, removed or changed since the preparation.

    Only files are compared, if this user can find any of them. A file is hashed if its size or time
    differs, as after a copy.
    """
    then = manifest.sources  # empty unless the source is files
    now: FileStates = {}
    if then:
        with suppress(OSError):  # this user may not read the text
            now = file_states(_files_now(manifest), known=then)
    if not now:
        return None

    differing = _hashes(then) ^ _hashes(now)
    name, _ = min(differing, default=(None, ""))
    return name


def _hashes(states: FileStates) -> set[tuple[str, str]]:
    return {(name, state["sha256"]) for name, state in states.items()}


def _files_now(manifest: Manifest) -> list[Path]:
    """Return the files that the source of a corpus names now."""
    try:
        paths, _ = source_files(manifest.source.removeprefix("files:"))
        return paths
    except ConfigError:  # one of its paths has no file any more
        return list(filter(Path.is_file, map(Path, manifest.sources)))
