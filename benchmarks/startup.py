"""CPU seconds (user and system) before a command works, comparable on busy and idle machines.

    python -m benchmarks.startup [--rounds 3] [--out benchmarks/results/startup.json]

The minimum over rounds counts. `fit` trains `tiny` and is timed to its first line of progress,
after the first step.
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

from lightning_sv.corpus import CorpusConfig, prepare
from lightning_sv.runs.provenance import Provenance

ROOT = Path(__file__).parent.parent
LAYERS = ("base", "optim/adamw", "schedule/cos", "trainer/cpu", "data/stdlib", "model/tiny")
CONFIG = [f"--config={ROOT}/conf/{layer}.yaml" for layer in LAYERS]
#: command -> maximum seconds on an idle core
COMMANDS: dict[str, tuple[list[str], float]] = {
    "--help": (["--help"], 1.0),
    "theory --help": (["theory", "--help"], 2.5),
    "params": (["params", "--config", str(ROOT / "conf/model/tiny.yaml")], 2.5),
    "prepare --help": (["prepare", "--help"], 2.5),
    "generate --help": (["generate", "--help"], 2.5),
    "plan": (["plan", "--gpus", "1", *CONFIG], 7.0),
    "paper --dry-run": (["paper", "--dry-run", "--fig", "necessity"], 7.0),
}


def cpu_of(argv: list[str]) -> float:
    """Return the CPU seconds of one command."""
    done = subprocess.Popen(
        [sys.executable, "-m", "lightning_sv", *argv], stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(done.pid, 0)
    assert status == 0, argv
    return usage.ru_utime + usage.ru_stime


def cpu_until(text: str, log: Path, pid: int) -> float:
    """Return the CPU seconds of a running process when its log contains `text`."""
    while not log.is_file() or text not in log.read_text():
        time.sleep(0.005)
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def first_step(folder: Path, rounds: int) -> float:
    """Return the CPU seconds of `fit` to its first step."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
    source = "files:" + ",".join(map(str, files))
    corpus = str(folder / "corpus")
    prepare(
        CorpusConfig(dir=corpus, source=source, tokenizer="bpe:1024", val_fraction=0.2),
        progress=False,
    )
    words = [
        "--data.corpus.dir",
        corpus,
        "--data.corpus.tokenizer",
        "bpe:1024",
        "--data.val_sequences",
        "8",
    ]
    words = [*CONFIG, *words, "--data.validations", "1", "--trainer.max_steps", "40"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    fit = []
    for i in range(rounds):
        log = folder / f"fit{i}.log"
        with log.open("wb") as file:
            command = [
                sys.executable,
                "-m",
                "lightning_sv",
                "fit",
                *words,
                "--run_dir",
                str(folder / f"fit{i}"),
            ]
            plain = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env)
        fit.append(cpu_until("step 1/40", log, plain.pid))
        plain.wait()
    return min(fit)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/startup.json")
    options = parser.parse_args()
    most = {name: limit for name, (_, limit) in COMMANDS.items()}
    most |= {"report": 3.0, "fit, first step": 7.0}
    seconds = {
        name: min(cpu_of(argv) for _ in range(options.rounds))
        for name, (argv, _) in COMMANDS.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        seconds["fit, first step"] = first_step(Path(folder), options.rounds)
        report = ["report", str(Path(folder) / "fit0"), "--out", str(Path(folder) / "report")]
        seconds["report"] = min(cpu_of(report) for _ in range(options.rounds))
    found: dict[str, Any] = {"provenance": Provenance.now()._asdict(), "rounds": options.rounds}
    found["cpu_seconds"] = {name: round(value, 2) for name, value in seconds.items()}
    for name, value in seconds.items():
        print(f"{name:32} {value:5.2f} s of at most {most[name]:.1f}")
    options.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
