"""Run directories: resumed runs, long curves, and refused directories."""

import json
from pathlib import Path

import numpy as np
import pytest
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from torch.utils.tensorboard import SummaryWriter

from lightning_sv.errors import ConfigError
from lightning_sv.runs.directory import segment_suffix
from lightning_sv.runs.events import read_run
from tests.experiments.fake_fit import record


def finish(directory: Path) -> None:
    """Add the files of a completed run."""
    (directory / "config.yaml").write_text("model: {scale: llama}\noptim: {lr: 1e-3}\n")
    (directory / "summary.json").write_text(json.dumps({"label": "llama", "tokens": 40}))


def write(
    folder: Path, points: list[tuple[int, float]], number: int, start: int | None = None
) -> Path:
    """Write an event file of val/loss, with the mark of `RunLogger` for its start.

    Names of later files sort first, as if clocks ran backwards.
    """
    with SummaryWriter(str(folder)) as writer:
        if start is not None:
            event = Event(session_log=SessionLog(status="START"))
            writer.file_writer.add_event(event, start + 1)
        for tokens, value in points:
            writer.add_scalar("val/loss", value, tokens)
        written = Path(writer.file_writer.event_writer._file_name)
    return written.rename(folder / f"events.out.tfevents.{99 - number}.segment-{number}")


def test_read_run_resumed_keeps_the_last_written_value(tmp_path: Path) -> None:
    write(tmp_path, [(10, 4.0), (20, 9.0), (30, 9.0)], number=1)
    write(tmp_path, [(20, 2.5), (30, 2.0), (40, 1.5)], number=2)
    finish(tmp_path)
    run = read_run(tmp_path)
    tokens, values = run.curve("val/loss")
    assert tokens.tolist() == [10, 20, 30, 40] and tokens.dtype == np.int64
    assert values.tolist() == [4.0, 2.5, 2.0, 1.5]
    assert (run.label, run.val_loss, run.tokens) == ("llama", 1.5, 40)
    assert run.config["optim"]["lr"] == 1e-3  # a number, although YAML 1.1 reads text


def test_read_run_drops_points_beyond_a_resume(tmp_path: Path) -> None:
    killed = write(tmp_path, [(10, 4.0), (20, 3.0), (30, 2.0), (40, 1.0)], 1, start=0)
    killed.write_bytes(killed.read_bytes()[:-10])  # inside a record
    write(tmp_path, [(24, 2.5), (28, 2.4)], 2, start=20)
    run = read_run(tmp_path, complete=False)
    assert run.curve("val/loss").tokens.tolist() == [10, 20, 24, 28]
    assert run.val_loss == np.float32(2.4)
    # killed before its first checkpoint, that start has no successor
    write(tmp_path, [(22, 2.7)], 3, start=20)
    assert read_run(tmp_path, complete=False).curve("val/loss").tokens.tolist() == [10, 20, 22]


def test_segment_suffix_is_one_more_than_the_largest(tmp_path: Path) -> None:
    assert segment_suffix(tmp_path) == ".segment-1"
    write(tmp_path, [(20, 3.0)], 9)
    write(tmp_path, [(30, 2.0)], 10)
    assert segment_suffix(tmp_path) == ".segment-11"


def test_read_run_of_two_writers_at_once_keeps_the_tags_of_both(tmp_path: Path) -> None:
    write(tmp_path, [(20, 2.5), (40, 1.5)], number=0)
    with SummaryWriter(str(tmp_path), filename_suffix=".train") as writer:
        for tokens in (10, 20, 30, 40):
            writer.add_scalar("train/loss", 1.0, tokens)
    finish(tmp_path)
    run = read_run(tmp_path)
    assert run.curve("val/loss")[0].tolist() == [20, 40]
    assert run.curve("train/loss")[0].tolist() == [10, 20, 30, 40]


@pytest.mark.parametrize("event", [b"\xff", b"no event"])
def test_read_run_of_a_file_of_other_records_is_refused(event: bytes, tmp_path: Path) -> None:
    write(tmp_path, [(20, 2.5)], number=0)
    (tmp_path / "events.out.tfevents.1").write_bytes(record(event))
    with pytest.raises(ConfigError, match=r"tfevents\.1"):
        read_run(tmp_path, complete=False)


@pytest.mark.parametrize("stated", [{"val_loss": 1.6}, {"val_loss": 1.5, "tokens": 50}, None])
def test_read_run_summary_that_contradicts_events_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stated: dict[str, float] | None
) -> None:
    events = write(tmp_path, [(20, 3.0), (40, 1.5)], 1)
    finish(tmp_path)
    if stated is None:  # the file is cut
        events.write_bytes(events.read_bytes()[:-1])
        stated = {"val_loss": 1.5}
    (tmp_path / "summary.json").write_text(json.dumps({"tokens": 40} | stated))
    with pytest.raises(ConfigError, match="summary"):
        read_run(tmp_path)
    read_run(tmp_path, complete=False)
    assert "summary" in caplog.text


@pytest.mark.parametrize(
    ("model", "stated", "label"),
    [
        ({"scale": "unified"}, "hg+dnp+or+iwd", "hg+dnp+or+iwd"),
        ({"scale": "hg+nowhere:Mine"}, None, "hg+nowhere:Mine"),  # and nothing is imported
        (
            {"scale": "hg", "scale_options": {"placement_at": {"lm_head": "dp"}}},
            None,
            "hg[lm_head=dp]",
        ),
    ],
    ids=["stated", "own vector", "option"],
)
def test_read_run_label_and_seed_are_those_of_summary_and_config(
    tmp_path: Path, model: dict[str, object], stated: str | None, label: str
) -> None:
    write(tmp_path, [(40, 1.5)], 1)
    config = {"seed_everything": 3, "model": model, "note": {"\x1b]": ["\x1b["]}}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    summary = {"label": stated, "seed": 7, "torch": "2\x1b[31m"}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    run = read_run(tmp_path)
    assert (run.label, run.summary["label"], run.summary["seed"]) == (label, label, 3)
    # a terminal would obey an escape character
    assert run.summary["torch"].isprintable()
    assert str(run.config["note"]).count("\N{REPLACEMENT CHARACTER}") == 2


def test_read_run_incomplete_or_damaged_directory_is_refused(tmp_path: Path) -> None:
    def refused(message: str, path: Path = tmp_path, *, complete: bool = True) -> None:
        with pytest.raises(ConfigError, match=message):
            read_run(path, complete=complete)

    refused("nowhere.*lightning-sv runs", tmp_path / "nowhere")
    refused(r"config\.yaml.*lightning-sv runs", complete=False)
    write(tmp_path, [(10, 4.0)], number=1)
    refused("expected a complete run")
    assert read_run(tmp_path, complete=False).label == tmp_path.name
    finish(tmp_path)
    with pytest.raises(ConfigError, match="'val/lost'"):
        read_run(tmp_path).curve("val/lost")
    (tmp_path / "config.yaml").write_text("model: [")
    refused(r"config\.yaml is not valid YAML")
    (tmp_path / "summary.json").write_text("{")
    refused(r"summary\.json cannot be read as JSON")
