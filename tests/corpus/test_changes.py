"""Changes in the files of a corpus's text are noticed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import datasets
import pytest

from lightning_sv.__main__ import main
from lightning_sv.corpus import CorpusConfig, prepare
from lightning_sv.corpus.sources import hub
from lightning_sv.errors import ConfigError
from lightning_sv.settings.data import DataConfig


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_text(f"note {number}\n" * 40)
    return folder


@pytest.fixture
def own(tmp_path: Path, notes: Path) -> CorpusConfig:
    return CorpusConfig(dir=str(tmp_path / "corpus"), source=f"files:{notes}", tokenizer="bpe:257")


def _rewrite(path: Path) -> None:
    """Other text of the same size."""
    path.write_text(path.read_text().replace("note", "nota"))


@pytest.mark.parametrize(
    ("source", "change", "message"),
    [
        ("files:{}", lambda n: (n / "0.txt").write_text("note 0\n" * 41), "0.txt has changed"),
        ("files:{}", lambda n: _rewrite(n / "1.txt"), "1.txt has changed"),
        ("files:{}", lambda n: (n / "3.md").write_text("new"), "3.md is new"),
        ("files:{}", lambda n: (n / "2.txt").unlink(), "2.txt is gone"),
        ("files:{}", lambda n: (n / "2.txt").rename(n / "4.txt"), "2.txt is gone, .*4.txt is new"),
        ("files:{0}/0.txt,{0}/1.txt", lambda n: (n / "1.txt").unlink(), "1.txt is gone"),
    ],
)
def test_changed_text_is_refused_by_prepare_and_named_by_training(
    source: str, change: Callable[[Path], object], message: str, notes: Path, own: CorpusConfig,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    own = replace(own, source=source.format(notes))
    made = prepare(own, progress=False)
    assert prepare(own, progress=False) == made
    change(notes)
    before = {path: path.stat().st_mtime_ns for path in Path(own.dir).rglob("*")}
    with pytest.raises(ConfigError, match=f"dir={own.dir} .*{message}"):
        prepare(own, progress=False)
    assert {path: path.stat().st_mtime_ns for path in Path(own.dir).rglob("*")} == before
    capsys.readouterr()
    DataConfig(CorpusConfig(dir=own.dir, tokenizer="bpe:257"), seq_len=4, global_batch=1).check(257)
    assert message.partition(",")[0] in capsys.readouterr().err


def test_prepare_equal_text_is_no_change(notes: Path, own: CorpusConfig, capsys: pytest.CaptureFixture[str]) -> None:
    """A copy or a touch; text that was moved away altogether."""
    made = prepare(own, progress=False)
    os.utime(notes / "0.txt", (1, 1))
    args = [f"--data.corpus.{key}={getattr(own, key)}" for key in ("dir", "source", "tokenizer")]
    assert main(["prepare", *args]) == 0
    assert "already prepared" in capsys.readouterr().out
    shutil.rmtree(notes)
    assert prepare(own, progress=False) == made


def test_hub_source_revision_is_read_and_recorded(own: CorpusConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []

    def load(*args: object, **kwargs: object) -> list[dict[str, str]]:
        read.append(kwargs["revision"])
        return [{"text": f"row {number} of the hub"} for number in range(20)]

    monkeypatch.setattr(hub, "_hub_revision", lambda config: "first")
    monkeypatch.setattr(datasets, "load_dataset", load)
    config = replace(own, source="hf:nobody/some")
    made = prepare(config, progress=False)
    assert made.packages == {"hf:nobody/some": "first"} and set(read) == {"first"}
    monkeypatch.delattr(hub, "_hub_revision")  # it is not asked again
    assert prepare(config, progress=False) == made
