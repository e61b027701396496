"""Run directories: locked as they were selected, read, and listed by `lightning-sv runs`."""

import errno
import fcntl
import json
from pathlib import Path
from unittest.mock import Mock

import pytest

from lightning_sv.__main__ import main
from lightning_sv.atomic import locked
from lightning_sv.errors import ConfigError
from lightning_sv.runs import lock
from lightning_sv.runs.directory import CONFIG, LAST, SUMMARY, read_summary, run_of
from lightning_sv.runs.lock import (
    RUN_DIR_VARIABLE,
    acquire,
    check_run_dir,
    clear_unfinished,
    find_last_checkpoint,
    make_run_dir,
)
from tests.conftest import Told


def make_run(run: Path) -> Path:
    """Make the directory of a run with a checkpoint, all of its files empty."""
    (run / LAST).parent.mkdir(parents=True)
    (run / LAST).touch()
    (run / CONFIG).touch()
    return run


@pytest.mark.parametrize("again", [False, True])
def test_acquire_run_finished_since_is_refused(again: bool, tmp_path: Path) -> None:
    run = tmp_path / "run"
    check_run_dir(str(run), None, again=again)
    make_run(run)
    with pytest.raises(ConfigError, match="run_dir"):
        acquire(run, None, again=again)
    acquire(run, str(run / LAST)).release()


def test_acquire_run_without_a_checkpoint_only_again(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / LAST).unlink()
    with pytest.raises(ConfigError, match="run_dir"):
        acquire(run, None)
    acquire(run, None, again=True).release()
    events = [folder / "events.out.tfevents.1" for folder in (run, tmp_path)]
    for file in events:
        file.touch()
        clear_unfinished(file.parent)
    # those of a folder that is no run stay
    assert [file.exists() for file in events] == [False, True]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_acquire_file_system_without_locks_leaves_none(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As the file of a run that was killed would stay locked."""
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(number, "not supported")))
    monkeypatch.setattr(lock, "LOCK_SECONDS", 0)
    for _ in range(2):
        acquire(tmp_path, None)
        with locked(tmp_path / "corpus", "download"):  # of a corpus
            pass
    assert caplog.text.count(f"{tmp_path} cannot be locked") == 4


def test_link_to_no_checkpoint_is_no_fresh_start(tmp_path: Path) -> None:
    last = tmp_path / LAST
    assert find_last_checkpoint(str(tmp_path)) is None
    last.parent.mkdir()
    last.symlink_to("step-6.ckpt")
    with pytest.raises(ConfigError, match="^ckpt_path is"):
        find_last_checkpoint(str(tmp_path))
    with pytest.raises(ConfigError, match="^run_dir"):
        acquire(tmp_path, None)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("val_loss", "x"),
        ("label", ["llama"]),
        ("seed", True),
        ("tokens", 1.5),
        ("parameters", -1),
        ("tokens", 1 << 63),
        ("legs", {}),
        ("origin", "a"),
    ],
)
def test_read_summary_wrong_type_is_refused(tmp_path: Path, key: str, value: object) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"val_loss": 3, "tokens": None, key: value}))
    with pytest.raises(ConfigError, match=rf"summary\.json: {key} is"):
        read_summary(tmp_path)


def test_run_dir_foreign_checkpoint_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint may resume into a new directory; without one, it must be in the directory of its
    run."""
    a, b = (make_run(tmp_path / name) for name in "ab")
    new = tmp_path / "new"
    alone = tmp_path / "x.ckpt"
    alone.touch()
    monkeypatch.setenv(RUN_DIR_VARIABLE, "")  # which make_run_dir sets

    def chosen(given: Path | None, ckpt_path: Path) -> Path:
        place = given and str(given)
        check_run_dir(place, str(ckpt_path))
        return make_run_dir("x", place, str(ckpt_path))

    assert chosen(a, a / LAST) == chosen(None, a / LAST) == a
    (a / LAST.parent).rename(tmp_path / "other disk")
    (a / LAST.parent).symlink_to(tmp_path / "other disk")
    assert chosen(a, a / LAST) == chosen(None, a / LAST) == a
    assert chosen(new, b / LAST) == chosen(new, alone) == new
    for other in (b / LAST, alone):
        with pytest.raises(ConfigError, match=f"run_dir {a} .*{other}"):
            chosen(a, other)
        with pytest.raises(ConfigError, match="^run_dir"):
            acquire(a, str(other))
    with pytest.raises(ConfigError, match="--run_dir"):
        chosen(None, alone)


def test_make_run_dir_default_is_new_for_each_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIGHTNING_SV_RUN_DIR", "")
    names = ["tiny/llama-seed0", "tiny/llama-seed0", "tiny/my_module:X-seed0"]
    made = [make_run_dir(name, None, None) for name in names]
    assert [path.name for path in made] == ["llama-seed0", "llama-seed0-2", "my_module.X-seed0"]
    assert all(path.is_dir() for path in made)
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        make_run_dir("tiny/llama-seed0", "file", None)


SETTINGS = """
model: {scale: llama, optim: {lr: null}}
data: {corpus: {dir: data/stdlib}}
trainer: {max_steps: 70}
"""


def test_runs_command_lists_settings_and_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["runs"]) == 2 and "runs" in capsys.readouterr().err
    runs = tmp_path / "runs"
    for name in ("tiny/a", "tiny/b", "c", "damaged", "tiny/a/checkpoints"):
        (runs / name).mkdir(parents=True)
        (runs / name / CONFIG).write_text(SETTINGS)
    summary = {"label": "unified\x1b[2J", "lr": 0.006, "steps": 12, "val_loss": 4.60240364074707}
    (runs / "tiny/a" / SUMMARY).write_text(json.dumps(summary))
    (runs / "damaged" / SUMMARY).write_text("{")
    assert main(["runs", "--json"]) == 0
    shown = capsys.readouterr()
    assert "damaged" in shown.err
    label = "unified\N{REPLACEMENT CHARACTER}[2J"
    state = {"data": "stdlib", "complete": False, "diverged": False}
    unfinished = state | {"strategy": "llama", "lr": None, "steps": 70, "val_loss": None}
    finished = state | summary | {"strategy": label, "complete": True}
    del finished["label"]
    rows = {"runs/c": unfinished, "runs/tiny/a": finished, "runs/tiny/b": unfinished}
    assert json.loads(shown.out) == [{"run": name, **row} for name, row in rows.items()]
    lines = told("runs", "runs/tiny").splitlines()[1:]
    assert len(lines) == 2
    assert lines[0].split() == f"runs/tiny/a stdlib {label} 0.006 12 4.6024".split()


def test_runs_command_cuts_no_path_that_another_program_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Told
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "40")
    run = Path("runs", "long" * 50)
    run.mkdir(parents=True)
    (run / CONFIG).write_text(SETTINGS)
    assert f"{run} " in told("runs")


def test_run_of_checkpoint_in_a_folder_of_its_own_is_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ModelCheckpoint takes the slash of `{val/loss}` in its filename for a folder."""
    run = make_run(tmp_path / "run")
    assert run_of(run / "checkpoints" / "epoch=0-val" / "loss=3.ckpt") == run
    assert run_of(run / LAST) == run
    assert run_of(run / "other" / "last.ckpt") is None
    (run / "checkpoints").mkdir(exist_ok=True)
    monkeypatch.chdir(run / "checkpoints")
    assert run_of(Path("last.ckpt")) == run
    assert run_of(Path("../../other_run")) is None
