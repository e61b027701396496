"""One run directory for all spellings of its path; a run resumed from a different folder finds its corpus."""

from pathlib import Path

import pytest

from lightning_sv.__main__ import main
from lightning_sv.runs.directory import CONFIG, LAST, SUMMARY, event_files, read_config


def test_run_directory_is_expanded_and_finds_its_corpus_from_elsewhere(
    run_args: list[str], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    (home / "$kept").mkdir()
    (home / "text").symlink_to(corpus)
    monkeypatch.chdir(home)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("NAME", "$kept/~")
    args = [*run_args, "--data.corpus.dir", "text", "--data.validations", "1", "--trainer.max_steps"]
    assert main(["fit", *args, "1", "--run_dir", "~/$NAME"]) == 0
    run = home / "$kept" / "~"
    assert event_files(run) and (run / CONFIG).is_file() and (run / SUMMARY).is_file() and (run / LAST).is_file()
    assert sorted(path.name for path in home.iterdir()) == ["$kept", "text"]
    assert list((home / "$kept").iterdir()) == [run]
    assert read_config(run)["data"]["corpus"]["dir"] == str(home / "text")
    monkeypatch.chdir(elsewhere)
    again = ["--config", "~/$NAME/config.yaml", "--ckpt_path", "~/$NAME/checkpoints/last.ckpt"]
    assert main(["validate", *again]) == 0
    assert not list(elsewhere.iterdir())
