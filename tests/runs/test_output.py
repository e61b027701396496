"""Readers that go, disks that are full, terminals that write less than we do."""

import os
import sys
from pathlib import Path
from typing import TextIO

import pytest

from lightning_sv.__main__ import main
from lightning_sv.cli.main import UNREAD, cli


def unread() -> TextIO:
    here, there = os.pipe()
    os.close(here)
    return os.fdopen(there, "w", buffering=1)


def full() -> TextIO:
    return Path("/dev/full").open("w", buffering=1)


@pytest.mark.parametrize("words", [["--help"], ["params", "--config", "conf/model/tiny.yaml"]])
def test_cli_closed_pipe_ends_quietly_and_full_disk_is_an_error(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the exit code of a program that SIGPIPE ends; a full disk is an error."""
    streams = unread(), full()
    for stream, expected in zip(streams, (UNREAD, 1), strict=True):
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "argv", ["lightning-sv", *words])
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
            patch.setattr(os, "environ", dict(os.environ))
            patch.setattr("gc.freeze", lambda: None)
            cli()
        error = capsys.readouterr().err
        assert (ended.value.code, error.count("error: "), "Traceback" in error) == (
            expected,
            expected == 1,
            False,
        )
        stream.close()


def test_main_without_home_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a container: HOME is not set, and the system does not know the user."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.getuid", lambda: 2**30)
    monkeypatch.setattr(
        "lightning_sv.cli.main._command", lambda name: lambda rest: len(str(Path.home()))
    )
    assert main(["runs"]) == 2 and "HOME" in capsys.readouterr().err
