"""Run directories: resumed runs, long curves, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from torch.utils.tensorboard import SummaryWriter

from lightning_sv.runs.events import read_run


def finish(directory: Path) -> None:
    """Add the files of a completed run."""
    (directory / "config.yaml").write_text("model: {scale: llama}\noptim: {lr: 1e-3}\n")
    (directory / "summary.json").write_text(json.dumps({"label": "llama", "tokens": 40}))


def write(directory: Path, points: list[tuple[int, float]], wall_time: float) -> None:
    """One event file of val/loss, as torch's writer makes it."""
    with SummaryWriter(str(directory), filename_suffix=f".{wall_time}") as writer:
        for tokens, value in points:
            writer.add_scalar("val/loss", value, tokens, walltime=wall_time)


def test_resumed_run_keeps_the_last_written_value(tmp_path: Path) -> None:
    """The later file wins where steps overlap, even when its name sorts first."""
    write(tmp_path, [(20, 2.5), (30, 2.0), (40, 1.5)], wall_time=200.0)
    write(tmp_path, [(10, 4.0), (20, 9.0), (30, 9.0)], wall_time=100.0)
    finish(tmp_path)
    run = read_run(tmp_path)
    tokens, values = run.curve("val/loss")
    assert tokens.tolist() == [10, 20, 30, 40] and tokens.dtype == np.int64
    assert values.tolist() == [4.0, 2.5, 2.0, 1.5]
    assert (run.label, run.val_loss, run.tokens) == ("llama", 1.5, 40)
    assert run.config["optim"]["lr"] == 1e-3  # a number, although YAML 1.1 reads text


def test_long_curves_are_read_whole(tmp_path: Path) -> None:
    """TensorBoard's own default would keep a random 10,000 of them."""
    write(tmp_path, [(i, float(i)) for i in range(12_000)], wall_time=1.0)
    finish(tmp_path)
    assert read_run(tmp_path).curve("val/loss").tokens.tolist() == list(range(12_000))


def test_refused_directories(tmp_path: Path) -> None:
    """Absent, empty, unfinished, unreadable, and an unknown tag: each says what is wrong."""
    with pytest.raises(ValueError, match="no run directory"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no TensorBoard scalars"):
        read_run(tmp_path, complete=False)
    write(tmp_path, [(10, 4.0)], wall_time=1.0)
    with pytest.raises(ValueError, match="not complete"):
        read_run(tmp_path)
    assert read_run(tmp_path, complete=False).label == tmp_path.name
    finish(tmp_path)
    with pytest.raises(ValueError, match=r"'val/lost'; it has val/loss"):
        read_run(tmp_path).curve("val/lost")
    (tmp_path / "config.yaml").write_text("model: [")
    with pytest.raises(ValueError, match=r"config\.yaml is not valid YAML"):
        read_run(tmp_path)
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        read_run(tmp_path)
