"""Progress of a run in a file that a different command reads."""

from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path

import lightning as L
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel
from rich.console import Console

from lightning_sv.callbacks import RunProgress
from lightning_sv.runs.job import Job
from lightning_sv.runs.launch import run_jobs
from lightning_sv.runs.progress import PROGRESS_VARIABLE, read_progress, report_progress


@pytest.mark.parametrize("content", [None, "", "[3", "7", "[3]", '["a", "b"]'])
def test_read_progress_without_a_complete_file_is_none(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    if content is not None:
        path.write_text(content)
    assert read_progress(path) is None


def test_report_progress_writes_only_where_a_command_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "progress.json"
    monkeypatch.delenv(PROGRESS_VARIABLE, raising=False)
    report_progress(1, 4)
    monkeypatch.setenv(PROGRESS_VARIABLE, str(path))
    report_progress(1, None)  # only time ends the run
    assert not path.exists()

    report_progress(1, 4)
    progress = read_progress(path)
    assert progress is not None and progress.fraction == 0.25
    monkeypatch.setenv(PROGRESS_VARIABLE, str(path / "below-a-file"))
    report_progress(2, 4)  # a disk that refuses does not end a run


def test_run_progress_reports_and_prints_the_last_step_without_a_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning validates at the end of an epoch, and max_steps may come before."""
    path = tmp_path / "progress.json"
    monkeypatch.setenv(PROGRESS_VARIABLE, str(path))
    progress = RunProgress()
    progress.stream = StringIO()
    trainer = L.Trainer(
        max_steps=4, callbacks=[progress], accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(BoringModel())
    assert read_progress(path) == (4, 4)
    lines = progress.stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/4", "2/4", "3/4", "4/4"]


def test_run_jobs_names_the_file_and_removes_it(tmp_path: Path) -> None:
    """In a thread, as in a notebook or a server: Python installs no signal handler there."""
    script = f'echo "[1, 4]" > "${PROGRESS_VARIABLE}"; cat "${PROGRESS_VARIABLE}"; exit 3'
    jobs = [Job(name, ("sh", "-c"), (script,), tmp_path / name) for name in ("a", "b")]
    with ThreadPoolExecutor() as pool:
        failed = pool.submit(run_jobs, jobs, parallel=2, console=Console(quiet=True)).result()
    for job in jobs:
        assert "exit code 3" in failed[job.name] and "[1, 4]" in failed[job.name]
        assert not job.progress.exists()
