"""Llama-0.12B on one CUDA device: llama, hg+dp+or and unified by `fit`, in parts of some minutes.

    python -m benchmarks.gpu_train [--minutes 9] [--tokens 50000000] [--state runs/gpu_train] [--out DIR] [-- ANY KEY]

The schedule is fixed by the budget in tokens. Each arm gets its share of the minutes that are left; one that is not
done then is stopped by SIGTERM, which leaves a checkpoint, and goes on in the next part. Arms that are done are
compared by `report`. One seed: a demonstration, not a verdict.
"""

import subprocess
import sys
import tarfile
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
ARMS = ("llama", "hg+dp+or", "unified")
#: seconds that a run has, after it was asked to stop, to finish its step and write its checkpoint
GRACE = 40


def main(argv: Sequence[str] | None = None) -> int:
    """Train a part of every arm, report on those that are done; return 0, 1 if a run failed, 2 for wrong input."""
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    parser = ArgumentParser(prog="python -m benchmarks.gpu_train", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9, help="of this part, all included")
    parser.add_argument("--tokens", type=float, default=50e6, help="budget of an arm, over all parts")
    parser.add_argument("--model", default="llama-0.12b", help="of conf/model")
    parser.add_argument("--trainer", default="gpu", help="of conf/trainer")
    parser.add_argument("--data", default="installed", help="of conf/data")
    parser.add_argument("--batch", type=int, default=64, help="sequences an optimizer step")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), help="strategies; the first is the baseline")
    parser.add_argument("--state", type=Path, default=Path("runs/gpu_train"), help="runs and checkpoints, to continue")
    parser.add_argument("--out", type=Path, help="where the report and runs.tar.gz go; default: --state")
    options = parser.parse_args(words[:cut])
    end = time.monotonic() + 60 * options.minutes
    out: Path = options.out or options.state / "report"
    command = _fit(options, words[cut + 1 :])
    if isinstance(command, str):
        print(f"error: {command}", file=sys.stderr)
        return 2
    if _run("prepare", "--config", str(ROOT / f"conf/data/{options.data}.yaml"), *_corpus_keys(words[cut + 1 :])):
        return 1
    left = [arm for arm in options.arms if not _done(options.state / arm)]
    failed = []
    for i, arm in enumerate(left):
        share = (end - time.monotonic()) / (len(left) - i)
        code = train(arm, options.state / arm, command, share)
        if code not in (0, 143):  # 143: stopped, with a checkpoint
            failed.append(arm)
    done = [options.state / arm for arm in options.arms if _done(options.state / arm)]
    if done:
        _run("report", *map(str, done), "--out", str(out))
        pack(options.state, out / "runs.tar.gz")
    print(f"{len(done)} of {len(options.arms)} arms are done{'' if not failed else f', failed: {failed}'}", flush=True)
    return 1 if failed else 0


def train(arm: str, run_dir: Path, command: list[str], seconds: float) -> int:
    """Train an arm until it is done or its seconds are over; return the exit code of `fit`."""
    resumed = ["--ckpt_path", "last"] if (run_dir / "checkpoints/last.ckpt").is_file() else []
    cache = ["--compile_cache", str(run_dir / "checkpoints/compiled.bin")]  # the next part may be on a fresh machine
    words = [*command, "--model.scale", arm, "--run_dir", str(run_dir), *resumed, *cache]
    process = subprocess.Popen([sys.executable, "-m", "lightning_sv", "fit", *words])
    if not wait(process, run_dir, max(0.0, seconds - GRACE)):
        process.terminate()
        try:
            if process.wait(GRACE) == -15:  # it had not begun to train
                return 143
        except subprocess.TimeoutExpired:  # in a step that still compiles: it goes on from the checkpoint before
            process.kill()
            process.wait()
            return 143
    return process.returncode


def wait(process: "subprocess.Popen[bytes]", run_dir: Path, seconds: float) -> bool:
    """Whether the process ended within its seconds."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def pack(state: Path, archive: Path) -> None:
    """Put the run directories without their checkpoints into a tar.gz."""

    def kept(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if Path(info.name).name in ("checkpoints", "report") else info

    with tarfile.open(archive, "w:gz") as tar:
        tar.add(state, arcname="runs", filter=kept)


def _fit(options: Any, rest: list[str]) -> list[str] | str:
    """The arguments of `fit` that all arms share, or what is wrong with the input."""
    import torch

    if options.trainer == "gpu" and not torch.cuda.is_available():
        return "there is no CUDA device (or torch is built without CUDA)."
    names = ("base", "optim/adamw", "schedule/cos", f"trainer/{options.trainer}", f"data/{options.data}")
    files = [ROOT / f"conf/{name}.yaml" for name in (*names, f"model/{options.model}")]
    for file in files:
        if not file.is_file():
            return f"there is no {file.relative_to(ROOT)}."
    sizes = yaml.safe_load(files[-1].read_text())["data"]
    steps = int(options.tokens // (sizes["seq_len"] * options.batch))
    if steps < 1 or options.minutes <= 0:
        return "--tokens is less than one step, or --minutes is not positive."
    words = [word for file in files for word in ("--config", str(file))]
    words += ["--trainer.max_steps", str(steps), "--data.global_batch", str(options.batch), "--data.validations", "10"]
    return [*words, "--data.micro_batch", str(min(32, options.batch)), *rest]


def _corpus_keys(rest: list[str]) -> list[str]:
    """Of keys and values those of the corpus."""
    pairs = zip(rest[::2], rest[1::2], strict=True)
    return [word for key, value in pairs if key.startswith("--data.corpus.") for word in (key, value)]


def _run(*words: str) -> int:
    return subprocess.run([sys.executable, "-m", "lightning_sv", *words], check=False).returncode


def _done(run_dir: Path) -> bool:
    return (run_dir / "summary.json").is_file()


if __name__ == "__main__":
    sys.exit(main())
