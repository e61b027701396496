"""Stage 7: compiled code in one file, so that such a machine need not compile again."""

import lzma
import os
import tarfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.process import Task

FILE = "compile-cache.tar.xz"
MOST_BYTES = 16 * 2**20
#: cache folder of inductor and triton; it must not move, because files contain its path
VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def set_place(folder: Path) -> None:
    """Let this process and its children compile into `folder`."""
    os.environ[VARIABLE] = str(folder / "inductor")


def load(archive: Path) -> str:
    """Unpack a saved cache into the compiler's folder; return a description."""
    place = Path(os.environ[VARIABLE])
    if place.exists():
        return "the machine's own compile cache is used"
    if not archive.is_file():
        return "nothing was compiled before"
    place.mkdir(parents=True)
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(place, filter="data")
    except (tarfile.TarError, OSError, EOFError, lzma.LZMAError) as error:
        return f"{archive} could not be unpacked ({error})"
    return f"compile cache of {archive}"


def run(task: Task) -> dict[str, Any]:
    """Pack the cache into options['out'], unless it exceeds the transfer limit."""
    place = Path(os.environ[VARIABLE])
    archive = Path(task.options["out"]) / FILE
    archive.parent.mkdir(parents=True, exist_ok=True)
    files = [path for path in sorted(place.rglob("*")) if path.is_file() and path.suffix != ".lock"]
    found: dict[str, Any] = {
        "files": len(files),
        "bytes": sum(path.stat().st_size for path in files),
    }
    if not files:
        return found | {"saved": False, "why": "nothing was compiled"}
    partial = archive.with_name(f".{FILE}.partial")  # the deadline may interrupt it
    with tarfile.open(partial, "w:xz", preset=1) as tar:
        for path in files:
            tar.add(path, path.relative_to(place))
    partial.replace(archive)
    found |= {"saved": True, "archive": FILE, "archive_bytes": archive.stat().st_size}
    if archive.stat().st_size > task.options.get("most_bytes", MOST_BYTES):
        archive.unlink()
        found |= {
            "saved": False,
            "why": f"{found['archive_bytes'] / 2**20:.0f} MiB packed, and 16 come back",
        }
    return found
