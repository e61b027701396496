"""The record of a run that a different command started: command.json."""

import errno
from pathlib import Path

import pytest

from lightning_sv.errors import ConfigError
from lightning_sv.runs.directory import COMMAND
from lightning_sv.runs.job import Job


def test_prepare_full_disk_leaves_the_record_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, other = (Job("t", ("x",), (), tmp_path / "run", {"corpus": name}) for name in ("a", "b"))
    job.prepare()
    before = (job.run_dir / COMMAND).read_bytes()

    def full(self: Path, text: str, encoding: str | None = None) -> int:
        with self.open("w") as file:
            file.write(text[:5])
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="No space"):
            job.prepare()
        assert (job.run_dir / COMMAND).read_bytes() == before and job.state() == "resume"
        with pytest.raises(ConfigError, match="corpus"):
            other.prepare()


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 100_000])
def test_prepare_damaged_record_is_refused(text: str, tmp_path: Path) -> None:
    job = Job("t", ("x",), (), tmp_path / "run")
    job.prepare()
    (job.run_dir / COMMAND).write_text(text)
    with pytest.raises(ConfigError, match=COMMAND):
        job.prepare()
