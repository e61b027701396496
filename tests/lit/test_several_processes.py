"""DDP and FSDP2 on two processes train as one process does, and resume, there and on one device."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_sv.__main__ import main
from lightning_sv.nn import MixtureOfExperts
from lightning_sv.paper import Run, read_run
from tests.lit.several_processes import MODELS, STEPS, STRATEGIES, arguments, fixed_choice


@pytest.fixture(scope="module")
def session_args(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    from tests.conftest import write_run_args

    return write_run_args(corpus, tmp_path_factory.mktemp("args"))


@pytest.fixture(scope="module")
def alone(session_args: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every model on one process."""
    out = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MixtureOfExperts, "_choose", fixed_choice)
        for name in MODELS:
            assert main(["fit", *arguments(session_args, name), "--run_dir", str(out / name)]) == 0
    return out


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_processes_are_one(
    strategy: str, session_args: list[str], alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", "tests.lit.several_processes", str(tmp_path), strategy, *session_args]
    done = subprocess.run(command, timeout=500, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for name in MODELS:
        for other in (name, f"{name}-stopped"):
            assert_same_run(read_run(alone / name), read_run(tmp_path / other))
    # the checkpoint of two processes, saved at their stop, goes on on one
    stopped = tmp_path / "muon-stopped" / "checkpoints" / "last.ckpt"
    assert torch.load(stopped, weights_only=True)["global_step"] == STEPS


def assert_same_run(one: Run, two: Run) -> None:
    """Every curve has the same steps; losses agree to 1e-5, the data exactly, all else to 1e-4."""
    assert two.curves.keys() == one.curves.keys()
    for tag, curve in one.curves.items():
        assert two.curve(tag).tokens.tolist() == curve.tokens.tolist(), (two.dir, tag)
        if not tag.startswith(("throughput", "memory")):
            close = 0 if tag == "data/batch_hash" else 1e-5 if tag.endswith("/loss") else 1e-4
            assert two.curve(tag).values == pytest.approx(curve.values, rel=close, abs=close), (two.dir, tag)
