"""Fits in processes of their own, and whether two runs are the same to the last bit."""

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

from lightning_sv.__main__ import main
from lightning_sv.lit.checkpoint.atomic_io import AtomicCheckpointIO
from lightning_sv.runs.events import Curve, read_run
from tests.conftest import argv, listen_to_interrupts

LAST = "checkpoints/last.ckpt"
#: values that depend on the clock and the machine
MEASURED = ("throughput/", "memory/", "sharpness/seconds")


def run_fit(words: Sequence[str], run_dir: Path) -> int:
    """Run `fit` in this process; return its exit code."""
    return main(["fit", *words, "--run_dir", str(run_dir)])


def start(
    args: list[str], run_dir: Path, module: str = "lightning_sv", **kwargs: Any
) -> subprocess.Popen:
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    command = [sys.executable, "-m", module, "fit", *args, "--run_dir", str(run_dir)]
    return subprocess.Popen(
        command, text=True, **{"preexec_fn": listen_to_interrupts, **output, **kwargs}
    )


def wait_for(process: subprocess.Popen, text: str) -> None:
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if text in line:
            return
    raise AssertionError(f"{text!r} never came:\n{''.join(seen)}")


def kill(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def finish(process: subprocess.Popen, seconds: float = 120) -> tuple[int, str]:
    """Exit code and the rest of the output."""
    output = process.communicate(timeout=seconds)[0]
    return process.returncode, output


@contextmanager
def leaving(stopped: Path, step: int, of: Path | None = None) -> Iterator[None]:
    """Keep a copy of the run directory (`of` alone) as a kill right after the checkpoint of `step`
    leaves it."""
    save = AtomicCheckpointIO.save_checkpoint

    def keep(self: AtomicCheckpointIO, checkpoint: dict, path: object, **more: object) -> None:
        save(self, checkpoint, path)
        run = Path(str(path)).parents[1]
        if checkpoint["global_step"] == step and of in (None, run):
            shutil.copytree(run, stopped)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AtomicCheckpointIO, "save_checkpoint", keep)
        yield


def load(run: Path) -> dict[str, Any]:
    """Return the last checkpoint without the seconds of its legs and the number of loader
    workers."""
    checkpoint: dict[str, Any] = torch.load(run / LAST, weights_only=True)
    del checkpoint["lightning_sv"]["legs"]
    checkpoint.get("datamodule_hyper_parameters", {}).pop("num_workers", None)
    return checkpoint


def flip(file: Path) -> None:
    """Flip a bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def contents(folder: Path) -> dict[Path, bytes]:
    """Every file of a folder, byte for byte."""
    return {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def differences(one: Any, two: Any, path: str = "") -> list[str]:
    """Return the places at which two checkpoints differ in type, length, key or bit; NaN equals
    NaN."""
    if isinstance(one, dict) and isinstance(two, dict) and one.keys() == two.keys():
        places = []
        for key in one:
            places += differences(one[key], two[key], f"{path}.{key}")
        return places
    if type(one) is not type(two):
        return [path]
    if isinstance(one, list | tuple) and len(one) == len(two):
        return differences(dict(enumerate(one)), dict(enumerate(two)), path)
    return [] if is_same(one, two) else [path]


def is_same(one: Any, two: Any) -> bool:
    """Return True if two values of one type are equal to the last bit."""
    if not isinstance(one, torch.Tensor):
        return bool(one == two or (one != one and two != two))
    if one.dtype != two.dtype or one.shape != two.shape:
        return False
    return torch.equal(one.view(-1).view(torch.uint8), two.view(-1).view(torch.uint8))


def same_checkpoint(whole: Path, other: Path) -> dict[str, Any]:
    """Assert that all of two runs' last checkpoints is the same bit for bit; return it."""
    one = load(whole)
    two = load(other)
    places = differences(one, two)
    assert places == [], places
    return one


def same_curves(whole: Path, other: Path, complete: bool = True) -> Mapping[str, Curve]:
    """Assert that all logged values except measurements are equal in every step; return the
    curves."""
    a, b = (read_run(path, complete=complete).curves for path in (whole, other))
    assert a.keys() == b.keys()
    for tag in a:
        assert b[tag].tokens.tolist() == a[tag].tokens.tolist(), tag
        if not tag.startswith(MEASURED):
            assert np.array_equal(b[tag].values, a[tag].values, equal_nan=True), tag
    return a


def commands_that_read(run: Path, args: list[str], new: Path) -> list[list[str]]:
    """Return every command that reads the last checkpoint of a run; some would make `new`."""
    last = run / LAST
    commands = (
        f"generate {run}",
        f"inspect {last}",
        f"export {run} {new}",
        f"validate ARGS --ckpt_path {last}",
        f"fit ARGS --model.init_from {last} --run_dir {new}",
        f"fit ARGS --ckpt_path {last} --run_dir {new}",
        f"fit ARGS --ckpt_path last --run_dir {run} --trainer.max_steps 3",
    )
    return [argv(words.replace("ARGS", shlex.join(args))) for words in commands]


def events(run: Path) -> list[dict[str, Any]]:
    """The lines of nonfinite.jsonl."""
    path = run / "nonfinite.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def drawn_charts(run: Path) -> dict[str, list[str]]:
    """Return 'PAGE: CHART' -> tags of its curves, as TensorBoard shows them; without empty ones."""
    (tensor,) = EventAccumulator(str(run)).Reload().Tensors("custom_scalars__config__")
    layout = Layout.FromString(tensor.tensor_proto.string_val[0])
    logged = sorted(read_run(run).curves)
    drawn = {}
    for page in layout.category:
        for chart in page.chart:
            patterns = "|".join(chart.multiline.tag)
            tags = [tag for tag in logged if re.match(patterns, tag)]
            if tags:
                drawn[f"{page.title}: {chart.title}"] = tags
    return drawn
