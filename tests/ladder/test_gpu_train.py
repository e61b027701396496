"""`make gpu_train` at toy size: stopped, resumed, reported."""

import json
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import gpu_train
from lightning_sv.__main__ import main
from lightning_sv.runs.events import read_run


class Here:
    """What `subprocess.Popen` of a command of ours is, in this process."""

    def __init__(self, command: list[str]) -> None:
        assert command[:3] == [sys.executable, "-m", "lightning_sv"]
        self.returncode = main(command[3:])

    def wait(self, seconds: float) -> int:
        return self.returncode


@pytest.mark.slow
def test_arms_are_stopped_resumed_and_reported(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {
        "corpus.dir": corpus, "corpus.tokenizer": "bpe:300", "corpus.val_fraction": 0.2, "corpus.max_bytes": 400_000,
        "val_sequences": 16, "corpus.source": read_source(corpus),
    }  # fmt: skip
    words = ["--trainer", "cpu", "--model", "tiny", "--batch", "8", "--tokens", "6144"]
    words += ["--state", str(tmp_path / "state"), "--out", str(tmp_path / "out"), "--"]
    words += [word for key, value in keys.items() for word in (f"--data.{key}", str(value))]
    words += ["--model.backbone.d_model", "32", "--checkpoint.every_n_steps", "1"]

    def until_a_checkpoint(process: Any, run_dir: Path, seconds: float) -> bool:
        while process.poll() is None and not (run_dir / "checkpoints/last.ckpt").is_file():
            time.sleep(0.02)
        return process.poll() is not None

    monkeypatch.setattr(gpu_train, "_run", lambda *words: main(words))
    with monkeypatch.context() as patch:
        patch.setattr(gpu_train, "wait", until_a_checkpoint)
        assert gpu_train.main(["--minutes", "10", "--arms", "llama", *words]) == 0
    assert not (tmp_path / "state/llama/summary.json").is_file()
    monkeypatch.setattr(gpu_train, "subprocess", SimpleNamespace(Popen=Here))
    assert gpu_train.main(["--minutes", "60", "--arms", "llama", "unified", *words]) == 0
    for arm in ("llama", "unified"):
        run = read_run(tmp_path / "state" / arm)
        assert run.summary["steps"] == 12 and run.tokens == 6144
    assert "unified ends below llama" in (tmp_path / "out/report.md").read_text().replace("hg+dnp+or+iwd", "unified")
    with tarfile.open(tmp_path / "out/runs.tar.gz") as tar:
        names = tar.getnames()
    assert "runs/unified/summary.json" in names and not any(name.endswith(".ckpt") for name in names)


def test_a_run_that_does_not_stop_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import signal, time; signal.signal(15, signal.SIG_IGN); open('on', 'w').close(); time.sleep(60)"
    (tmp_path / "lightning_sv").mkdir()
    (tmp_path / "lightning_sv/__main__.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gpu_train, "GRACE", 0.2)

    def until_on(process: Any, run_dir: Path, seconds: float) -> bool:
        while not (tmp_path / "on").is_file():
            time.sleep(0.01)
        return False

    monkeypatch.setattr(gpu_train, "wait", until_on)
    assert gpu_train.train("llama", tmp_path / "run", [], 0.0) == 143


def read_source(corpus: Path) -> str:
    source: str = json.loads((corpus / "manifest.json").read_text())["source"]
    return source


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trainer", "gpu"], "no CUDA device"),
        (["--trainer", "cpu", "--model", "llama-9b"], "there is no conf/model/llama-9b.yaml"),
        (["--trainer", "cpu", "--model", "tiny", "--tokens", "100"], "less than one step"),
    ],
)
def test_wrong_input(words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu_train.main(words) == 2
    assert message in capsys.readouterr().err
