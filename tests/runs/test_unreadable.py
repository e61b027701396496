"""A file that cannot be read is not called damaged, and no message advises to delete it."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from lightning_sv.atomic import file_sha256
from lightning_sv.corpus.manifest import Manifest
from lightning_sv.errors import UnreadableError
from lightning_sv.runs.checkpoint import check_checkpoint
from lightning_sv.runs.directory import read_config, read_stop, read_summary
from lightning_sv.runs.sharded_checkpoint import read_sharded

#: name of a file -> its reader, given the folder
READERS: dict[str, Any] = {
    "summary.json": read_summary,
    "config.yaml": read_config,
    "nonfinite.jsonl": read_stop,
    "manifest.json": Manifest.load,
    "last.ckpt": lambda folder: check_checkpoint(str(folder / "last.ckpt")),
    "meta.pt": lambda folder: read_sharded(folder, tensors=False, checksums=True),
}


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE, errno.EMFILE])
@pytest.mark.parametrize("name", READERS)
def test_unreadable_file_is_not_damaged(
    name: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / name
    file.write_text(json.dumps({"text": "x"}))
    if name == "meta.pt":
        (tmp_path / ".metadata").touch()
        digests = {name: file_sha256(tmp_path / name) for name in ("meta.pt", ".metadata")}
        (tmp_path / "checksums.json").write_text(json.dumps(digests))

    def refuse(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path == file:
            raise OSError(number, os.strerror(number), str(path))
        return opened(path, *args, **kwargs)

    opened = Path.open
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UnreadableError) as error:
        READERS[name](tmp_path)
    message = str(error.value)
    assert str(file) in message and os.strerror(number) in message and "owner " in message
    assert not any(word in message for word in ("damaged", "remove", "delete", "again"))
