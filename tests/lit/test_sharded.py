"""Hybrid sharding and sharded checkpoints: killed on four processes, resumed on two, and read by one."""

import shutil
import signal
from pathlib import Path

import pytest

from lightning_sv.__main__ import main
from lightning_sv.errors import ConfigError
from lightning_sv.runs.checkpoint import check_checkpoint, load_backbone
from lightning_sv.runs.directory import LAST, read_summary
from lightning_sv.runs.events import read_run
from lightning_sv.runs.sharded_checkpoint import is_sharded
from tests.conftest import write_run_args
from tests.launch import launch
from tests.lit.several_processes import CPU, SHARDED, STEPS, STRATEGIES, arguments
from tests.lit.test_several_processes import assert_same_run


@pytest.fixture(scope="module")
def args(short_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    out = tmp_path_factory.mktemp("args")
    return [*arguments(write_run_args(short_corpus, out), "muon"), "--checkpoint.every_n_steps", "2"]


@pytest.fixture(scope="module")
def alone(args: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("alone") / "run"
    assert main(["fit", *args, "--run_dir", str(run)]) == 0
    return run


def fsdp(args: list[str], run: Path, ranks: int, *more: str) -> list[str]:
    fit = ["--config", str(STRATEGIES["fsdp"]), *CPU, *args, "--data.micro_batch", "4", *SHARDED, *more]
    return [*fit, "--trainer.devices", str(ranks), "--run_dir", str(run), "--ckpt_path", "last"]


@pytest.mark.long
def test_hybrid_sharded_run_resumed_on_fewer_ranks_equals_one_process(
    args: list[str], alone: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    hybrid = fsdp(args, run, 4, "--trainer.strategy.init_args.replicas", "2")
    ended = launch("tests.lit.sharded_checkpoints", "7", *hybrid, logs=tmp_path, seconds=300, ranks=4)
    assert not ended.fine
    assert is_sharded(run / LAST), ended
    step = check_checkpoint(str(run / LAST))["global_step"]
    assert step in {4, 6}

    (partial := run / LAST.parent / ".step-6.ckpt.partial").mkdir(exist_ok=True)  # as if killed while writing
    ended = launch("tests.lit.sharded_checkpoints", "-1", *fsdp(args, run, 2), logs=tmp_path, seconds=300)
    assert ended.fine, ended
    assert not partial.exists()
    assert [leg["steps"] for leg in read_summary(run)["legs"]] == [step, STEPS - step]
    assert_same_run(read_run(alone), read_run(run))
    assert [path.name for path in (run / LAST.parent).glob("step-*")] == [f"step-{STEPS}.ckpt"]

    # one process reads it: the weights, and the optimizer's state of a run that goes on. Adam divides small gradients
    # by themselves, so that single entries depend on the order of sums; a shard in the wrong place is off by its norm
    expected = load_backbone(alone).state_dict()
    for name, value in load_backbone(run).state_dict().items():
        assert (value - expected[name]).norm() <= 1e-2 * expected[name].norm(), name
    states = check_checkpoint(str(run / LAST), tensors=True)["optimizer_states"][0]["state"]
    for number, state in check_checkpoint(str(alone / LAST))["optimizer_states"][0]["state"].items():
        for key, value in state.items():
            assert (states[number][key] - value).norm() <= 1e-2 * value.norm(), (number, key)
    single = ["--run_dir", str(tmp_path / "single"), "--ckpt_path", str(run / LAST), "--allow_lr_jump"]
    assert main(["fit", *args, "--trainer.max_steps", "9", *single]) == 0

    # and refuses incomplete checkpoints
    broken = tmp_path / "broken.ckpt"
    shutil.copytree(run / LAST, broken)
    data = next(broken.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1])
    for damage in (lambda: None, (broken / ".metadata").unlink):
        damage()
        with pytest.raises(ConfigError, match="incomplete"):
            check_checkpoint(str(broken))


def test_replicas_that_do_not_divide_the_devices_are_refused(args: list[str], tmp_path: Path) -> None:
    words = fsdp(args, tmp_path / "run", 2, "--trainer.strategy.init_args.replicas", "3")
    ended = launch("tests.lit.sharded_checkpoints", "-1", *words, logs=tmp_path, seconds=300)
    assert set(ended.codes) <= {2, -signal.SIGABRT}, ended  # the first rank that leaves ends the other
    assert any("replicas is 3; expected a divisor of 2" in log for log in ended.logs)
    assert not (tmp_path / "run").exists()
