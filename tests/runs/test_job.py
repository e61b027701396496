"""The record of a run that another command started: command.json."""

import errno
from pathlib import Path

import pytest

from lightning_sv.runs.directory import COMMAND, CONFIG, LAST, SUMMARY
from lightning_sv.runs.job import Job


def test_a_disk_that_fills_up_leaves_the_record_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        with pytest.raises(OSError, match="No space"):
            other.prepare()  # which removes what the first left
    assert other.state() == "new"


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 100_000])
def test_a_damaged_record_begins_the_run_again_unless_something_would_be_lost(text: str, tmp_path: Path) -> None:
    job = Job("t", ("x",), (), tmp_path / "run")
    job.prepare()
    (job.run_dir / COMMAND).write_text(text)
    (job.run_dir / CONFIG).touch()
    assert job.state() == "restart"
    job.prepare()
    assert job.state() == "resume" and not (job.run_dir / CONFIG).exists()
    for kept in (LAST, Path(SUMMARY)):
        (job.run_dir / COMMAND).write_text(text)
        (job.run_dir / kept).parent.mkdir(exist_ok=True)
        (job.run_dir / kept).touch()
        with pytest.raises(ValueError, match=COMMAND):
            job.state()
