"""A run outlives its terminal and its reader, and its end can be repeated."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from lightning.fabric.utilities.rank_zero import rank_zero_only

from lightning_sv.__main__ import main
from lightning_sv.corpus.manifest import Manifest
from lightning_sv.lit.distributed import HUNG_UP
from lightning_sv.lit.module import PretrainModule
from tests.lit.runs import load
from tests.runs.test_output import full

SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def test_fit_hangup_in_setup_leaves_a_checkpoint(
    short_args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a SIGHUP during setup the run ends after one step, with a checkpoint."""
    run, pictures = tmp_path / "run", []
    fit = ["fit", *short_args, "--trainer.max_steps", "4", "--run_dir", str(run), "--ckpt_path", "last"]
    monkeypatch.setattr(rank_zero_only, "rank", 1)  # RANK of a launcher whose processes are runs of their own
    handlers = [signal.signal(number, signal.SIG_DFL) for number in SIGNALS]
    configure = PretrainModule.configure_model

    def hang_up(self: PretrainModule) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        configure(self)

    def draw(found: object, path: Path) -> None:
        pictures.append(path)
        os.kill(os.getpid(), signal.SIGINT)  # which the end does not wait for, nor break off at
        raise RuntimeError("no LaTeX")

    try:
        with monkeypatch.context() as patch, full() as lost:
            patch.setattr(PretrainModule, "configure_model", hang_up)
            patch.setattr(sys, "stdout", lost)
            assert main(fit) == HUNG_UP
        assert load(run)["global_step"] == 1
        monkeypatch.setattr("lightning_sv.analysis.run_plot.draw_run", draw)
        for times in (1, 2):  # the second time there is nothing to train, and the end comes again
            assert main([*fit, "--json"]) == 0
            shown = capsys.readouterr()
            figures = json.loads(shown.out)
            assert figures == {"run_dir": str(run), **json.loads((run / "summary.json").read_text())}
            assert len(pictures) == times and "run.png" in shown.err
        assert [signal.getsignal(number) for number in SIGNALS] == [signal.SIG_DFL] * len(SIGNALS)
    finally:
        for number, handler in zip(SIGNALS, handlers, strict=True):
            signal.signal(number, handler)


def test_fit_ignored_hangup_and_deleted_run_directory_is_one_error(
    short_args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def start(self: PretrainModule, batch: object, batch_idx: int) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        if self.global_step == 2:
            shutil.rmtree(run, ignore_errors=True)

    monkeypatch.setattr(PretrainModule, "on_train_batch_start", start)
    try:
        code = main(["fit", *short_args, "--trainer.max_steps", "4", "--run_dir", str(run)])
    finally:
        signal.signal(signal.SIGHUP, before)
    shown = capfd.readouterr()
    assert (code, shown.err.count("error: "), str(run) in shown.err, "Traceback" in shown.err) == (1, 1, True, False)


def test_loss_figures_perplexity_of_a_huge_loss_is_infinite(short_corpus: Path) -> None:
    assert Manifest.load(short_corpus).loss_figures(1e4)["val_perplexity"] == float("inf")
