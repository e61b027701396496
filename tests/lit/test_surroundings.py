"""The surroundings of a run: spellings of its path, other folders, SLURM, its terminal, and the end
of that."""

import os
import signal
import socket
from pathlib import Path

import pytest
from lightning.fabric.utilities.rank_zero import rank_zero_only

from lightning_sv.__main__ import main
from lightning_sv.corpus.manifest import Manifest
from lightning_sv.lit.backbone_module import BackboneModule
from lightning_sv.lit.signals import HUNG_UP
from lightning_sv.runs.directory import (
    CONFIG,
    LAST,
    SUMMARY,
    event_files,
    read_config,
    read_summary,
)
from lightning_sv.runs.events import read_run
from tests.conftest import Answer, Refused, argv
from tests.faults.test_signals import SRUN
from tests.lit.runs import load, run_fit


def set_environment(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_fit_expanded_run_dir_finds_its_corpus_from_elsewhere(
    run_args: list[str], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    elsewhere = tmp_path / "elsewhere"
    for folder in (home, elsewhere):
        folder.mkdir()
    (home / "text").symlink_to(corpus)
    monkeypatch.chdir(home)
    monkeypatch.setenv("HOME", str(home))
    words = "--data.corpus.dir text --data.validations 1 --trainer.max_steps 1 --run_dir ~/run"
    assert main(["fit", *run_args, *argv(words)]) == 0
    run = home / "run"
    assert event_files(run)
    for file in (CONFIG, SUMMARY, LAST):
        assert (run / file).is_file()
    assert sorted(path.name for path in home.iterdir()) == ["run", "text"]
    assert read_config(run)["data"]["corpus"]["dir"] == str(home / "text")
    monkeypatch.chdir(elsewhere)
    again = argv("--config ~/run/config.yaml --ckpt_path ~/run/checkpoints/last.ckpt")
    assert main(["validate", *again]) == 0
    assert not list(elsewhere.iterdir())


def test_fit_hpc_checkpoint_is_ignored(
    short_args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning resumes any hpc_ckpt_*.ckpt of the working directory under SLURM."""
    args = [*short_args, *argv("--trainer.max_steps 2 --scalars.every_n_steps 1")]
    assert run_fit(args, tmp_path / "other") == 0
    (tmp_path / "other" / LAST).rename(tmp_path / "hpc_ckpt_1.ckpt")
    set_environment(monkeypatch, SRUN)
    monkeypatch.chdir(tmp_path)
    assert run_fit(args, Path("run")) == 0
    assert read_run(Path("run")).curve("train/loss").tokens[0] == 32 * 32  # of the first step


NO_TASKS_PER_NODE = {key: SRUN[key] for key in SRUN if key != "SLURM_NTASKS_PER_NODE"}
#: variables of a launcher, words of `fit`, and what the error names
OTHER_PROCESSES = [
    (NO_TASKS_PER_NODE, "--trainer.strategy ddp --trainer.devices 2", "trainer.devices"),
    (NO_TASKS_PER_NODE | {"SLURM_NTASKS": "2"}, "", "--ntasks-per-node=2"),
    # Lightning ignores torchrun for one device: each process would be a run
    ({"RANK": "1", "WORLD_SIZE": "2"}, "", "--trainer.devices"),
]


@pytest.mark.parametrize(("variables", "words", "named"), OTHER_PROCESSES)
def test_fit_other_processes_than_those_of_the_launcher_are_refused(
    variables: dict[str, str],
    words: str,
    named: str,
    short_args: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refused: Refused,
) -> None:
    set_environment(monkeypatch, variables)
    run = tmp_path / "run"
    assert named in refused("fit", *short_args, *argv(words), "--run_dir", str(run))
    assert not run.exists()


def test_fit_tasks_of_srun_are_runs_of_their_own(
    short_args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the RANK of a launcher."""
    task = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_PROCID": "1"}
    set_environment(monkeypatch, SRUN | task | {"RANK": "1"})
    assert run_fit([*short_args, "--trainer.max_steps", "2"], tmp_path / "task") == 0


def test_fit_port_in_use_is_refused(
    short_args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    fit = ["fit", *short_args, *argv(f"--trainer.strategy ddp --run_dir {tmp_path / 'run'}")]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        set_environment(monkeypatch, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
        error = refused(*fit)
    assert port in error and "MASTER_PORT" in error


SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def test_fit_hangup_in_setup_leaves_a_checkpoint(
    short_args: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer: Answer,
) -> None:
    """After a SIGHUP during setup the run ends after one step, with a checkpoint."""
    run = tmp_path / "run"
    pictures: list[Path] = []
    words = f"--trainer.max_steps 4 --run_dir {run} --ckpt_path last"
    fit = ["fit", *short_args, *argv(words)]
    # RANK of a launcher whose processes are runs of their own
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    handlers = [signal.signal(number, signal.SIG_DFL) for number in SIGNALS]
    configure = BackboneModule.configure_model

    def hang_up(self: BackboneModule) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        configure(self)

    def draw(found: object, path: Path) -> None:
        pictures.append(path)
        os.kill(os.getpid(), signal.SIGINT)  # which the end does not wait for, nor break off at
        raise RuntimeError("no LaTeX")

    try:
        with monkeypatch.context() as patch:
            patch.setattr(BackboneModule, "configure_model", hang_up)
            assert main(fit) == HUNG_UP
        assert load(run)["global_step"] == 1
        monkeypatch.setattr("lightning_sv.plots.run_plot.draw_run", draw)
        for times in (1, 2):  # the second time there is nothing to train, and the end comes again
            assert answer(*fit) == {"run_dir": str(run), **read_summary(run)}
            assert len(pictures) == times
        assert [signal.getsignal(number) for number in SIGNALS] == [signal.SIG_DFL] * len(SIGNALS)
    finally:
        for number, handler in zip(SIGNALS, handlers, strict=True):
            signal.signal(number, handler)


def test_loss_metrics_perplexity_of_a_huge_loss_is_infinite(short_corpus: Path) -> None:
    assert Manifest.load(short_corpus).loss_metrics(1e4)["val_perplexity"] == float("inf")
