"""DDP and FSDP2 on two processes train as one process does, and resume, there and on one device."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_sv.__main__ import main
from lightning_sv.nn import MixtureOfExperts
from lightning_sv.paper import read_run
from tests.lit.several_processes import MODELS, STEPS, STOP_AT, STRATEGIES, arguments, fixed_choice


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
        one = read_run(alone / name)
        tags = {tag for tag in one.curves if not tag.startswith(("throughput", "memory"))}
        for other in (tmp_path / name, tmp_path / f"{name}-stopped"):
            two = read_run(other)
            assert two.curves.keys() == one.curves.keys()
            for tag in tags:
                assert two.curve(tag).tokens.tolist() == one.curve(tag).tokens.tolist(), (name, tag)
                a, b = (torch.tensor(run.curve(tag).values) for run in (one, two))
                exact = tag == "data/batch_hash"
                torch.testing.assert_close(
                    b, a, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-5, msg=lambda m, t=tag: f"{name} {t}: {m}"
                )
        saved = torch.load(tmp_path / f"{name}-stopped/checkpoints/last.ckpt", weights_only=True)
        assert saved["global_step"] == STEPS and STOP_AT < STEPS
