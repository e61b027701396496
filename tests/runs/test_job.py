"""Runs that a different command starts: their record, command.json, and signals to them."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_sv.atomic import file_sha256
from lightning_sv.errors import ConfigError
from lightning_sv.runs.directory import COMMAND
from lightning_sv.runs.job import Job
from lightning_sv.runs.launch import _stops_as_interrupt


def test_prepare_of_another_context_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    job = Job("t", ("x",), (), tmp_path / "run", {"corpus": "a"})
    job.prepare()
    before = (job.run_dir / COMMAND).read_bytes()
    other = replace(job, context={"corpus": "b"})
    with pytest.raises(ConfigError, match=r"context\.corpus is b; expected a"):
        other.prepare()
    assert (job.run_dir / COMMAND).read_bytes() == before
    assert job.state() == "resume"


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 100_000])
def test_prepare_damaged_record_is_refused(text: str, tmp_path: Path) -> None:
    job = Job("t", ("x",), (), tmp_path / "run")
    job.prepare()
    (job.run_dir / COMMAND).write_text(text)
    with pytest.raises(ConfigError, match=COMMAND):
        job.prepare()


def test_prepare_with_a_config_edited_since_the_plan_is_refused(tmp_path: Path) -> None:
    """Its directory is named by the planned settings."""
    config = tmp_path / "a.yaml"
    config.write_text("model: {scale: hg}\n")
    words = ("--config", str(config))
    job = Job("t", ("x",), words, tmp_path / "run", configs={str(config): file_sha256(config)})
    job.prepare()
    config.write_text("model: {scale: dp}\n")
    with pytest.raises(ConfigError, match=r"a\.yaml"):
        job.prepare()
    config.unlink()
    with pytest.raises(ConfigError, match=r"a\.yaml"):
        job.prepare()


def test_run_jobs_stop_on_sighup_unless_it_is_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with pytest.raises(KeyboardInterrupt), _stops_as_interrupt():
            os.kill(os.getpid(), signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # under nohup
        with _stops_as_interrupt():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
