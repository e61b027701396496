"""Pipes, sockets and devices in a directory that somebody else packed: refused in a sentence, never waited for."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Refused
from tests.runs.test_events import finish, write

FINISHED = ("config.yaml", "summary.json")


@pytest.fixture(autouse=True)
def _no_waiting() -> Iterator[None]:
    """End a test that waits for a pipe's other end."""

    def waited(*_: object) -> None:
        raise AssertionError("it waits for the pipe")

    before = signal.signal(signal.SIGALRM, waited)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("events.out.tfevents.1", ["report", "RUN"]),
        ("summary.json", ["report", "RUN"]),
        ("checkpoints/last.ckpt", ["generate", "RUN", "--prompt", "x"]),
        ("checkpoints/last.ckpt", ["inspect", "RUN"]),
        ("checkpoints/last.ckpt", ["fit", "--run_dir", "RUN", "--ckpt_path", "last"]),
        ("config.json", ["roles", "RUN"]),
        ("config.json", ["fit", "--model.init_from", "RUN"]),
        ("model.safetensors.index.json", ["inspect", "RUN"]),
        ("model.safetensors", ["inspect", "RUN"]),
    ],
)
def test_command_pipe_in_a_directory_is_refused(
    name: str, words: list[str], short_args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    refused: Refused,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    if not name.endswith(("json", "safetensors")) or name in FINISHED:
        write(run, [(10, 4.0)], wall_time=1.0)
        finish(run)
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    before = sorted(run.rglob("*"))
    settings = short_args if words[0] == "fit" else []
    error = refused(words[0], *settings, *(word.replace("RUN", str(run)) for word in words[1:]))
    assert Path(name).name in error or "no *.safetensors" in error
    assert sorted(run.rglob("*")) == before and not (tmp_path / "runs").exists()
