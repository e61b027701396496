"""A working directory with texts and corpora."""

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with a text, a folder without text, and two prepared corpora."""
    monkeypatch.chdir(tmp_path)
    for name in (
        "my notes/a.txt",
        "pictures/a.png",
        "data/letters/corpus.yaml",
        "out/old/corpus.yaml",
        "letters/a.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("text")
    return tmp_path
