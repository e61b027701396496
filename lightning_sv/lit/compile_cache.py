"""What torch.compile made, in one file that travels: a fresh machine of the same kind does not compile again."""

import os
from pathlib import Path

import torch


def load_compiled(path: Path) -> str:
    """Put the kernels of `path` where the compiler looks, and say so.

    The file may hold code: take it from runs of your own only. What another torch or device made is left unused.

    Raises:
        ValueError: the file is not one that `save_compiled` wrote
    """
    if not path.is_file():
        return f"compile cache {path}: none yet, written at the end"
    try:
        found = torch.compiler.load_cache_artifacts(path.read_bytes())
    except Exception as error:  # torch names no types here
        found, why = None, " ".join(str(error).split())
    else:
        why = "its content is not torch's"
    if found is None:
        raise ValueError(f"compile_cache {path} cannot be read ({why}); delete it, and it is written anew.")
    return f"compile cache {path}: {path.stat().st_size / 2**20:.1f} MiB"


def save_compiled(path: Path) -> None:
    """Write what this process has compiled, or taken from a cache, to `path`, whole or not at all; nothing if none."""
    made = torch.compiler.save_cache_artifacts()
    if made is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(made[0])
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
