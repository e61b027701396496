"""A preparation by several machines of a cluster, of which one is killed: SLURM or Ray.

    python -m benchmarks.cluster slurm TEXT.jsonl --folder SHARED [--megabytes 200] [--machines 2]
    python -m benchmarks.cluster ray TEXT.jsonl --folder SHARED [--megabytes 200] [--machines 2]

All machines prepare one corpus in the folder, which must be on a file system that they share, with
locks. When the first parts are complete, the task of one machine is killed. The corpus must have
the hash of one that a single process prepared, and no complete part may have been encoded again.
`slurm` needs `sbatch`; `ray` needs the package, and starts or joins its cluster.
"""

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.corpus import train_tokenizer, write_text
from benchmarks.ten_kills import add_result, complete_parts
from lightning_sv.corpus import CorpusConfig, Manifest, prepare
from lightning_sv.runs.provenance import Provenance

RESULTS = Path(__file__).parent / "results/cluster.json"
PARTS = 40
#: processes per machine
WORKERS = 2
#: number of complete parts after which a machine is killed
KILL_AFTER = 4


class Slurm:
    """An array of jobs, one per machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.job = ""

    def start(self, config: CorpusConfig, part_bytes: int, machines: int) -> None:
        """Submit the array."""
        keys = []
        for key in ("dir", "source", "tokenizer"):
            keys += [f"--data.corpus.{key}", getattr(config, key)]
        command = [sys.executable, "-m", "lightning_sv", "prepare", *keys]
        command += ["--workers", str(WORKERS), "--part_bytes", str(part_bytes)]
        log = self.folder / "slurm-%a.log"
        array = [f"--array=0-{machines - 1}", f"--cpus-per-task={WORKERS}", f"--output={log}"]
        words = ["sbatch", "--parsable", "--exclusive", *array, "--wrap", shlex.join(command)]
        self.job = subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()

    def kill_one(self) -> None:
        """Kill the processes of the first machine's job."""
        subprocess.run(["scancel", "--signal=KILL", "--full", f"{self.job}_0"], check=True)

    def wait(self) -> None:
        """Return when no job of the array is left."""
        words = ["squeue", "--noheader", "--job", self.job]
        while subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip():
            time.sleep(1)


class Ray:
    """A task per machine."""

    def __init__(self, folder: Path) -> None:
        import ray

        ray.init(include_dashboard=False)
        self.ray = ray
        self.tasks: list[Any] = []

    def start(self, config: CorpusConfig, part_bytes: int, machines: int) -> None:
        """Start the tasks, spread over the machines."""

        def on_one_machine() -> None:
            prepare(config, progress=False, workers=WORKERS, part_bytes=part_bytes)

        options = {"num_cpus": 1, "scheduling_strategy": "SPREAD", "max_retries": 0}
        task = self.ray.remote(**options)(on_one_machine)
        self.tasks = [task.remote() for _ in range(machines)]

    def kill_one(self) -> None:
        """Kill the worker of the first task."""
        self.ray.cancel(self.tasks[0], force=True)

    def wait(self) -> None:
        """Return when the other tasks have ended."""
        self.ray.get(self.tasks[1:])


ENGINES: dict[str, Callable[[Path], Slurm | Ray]] = {"slurm": Slurm, "ray": Ray}


def wait_for_parts(target: Path, count: int) -> dict[str, int]:
    """Return the complete parts when there are `count` of them, and when each was written."""
    while len(complete_parts(target)) < count:
        time.sleep(0.1)
    return complete_parts(target)


def encoded_again(target: Path, before: dict[str, int], engine: Slurm | Ray) -> int:
    """Wait for the end; return how many of the parts that were complete were written again."""
    again: set[str] = set()
    while not (target / "manifest.json").is_file():
        now = complete_parts(target)
        again |= {name for name, written in now.items() if before.get(name, written) != written}
        time.sleep(0.2)
    engine.wait()
    return len(again)


def prepare_together(
    folder: Path, text: Path, n_bytes: int, engine: Slurm | Ray, machines: int
) -> dict[str, Any]:
    """Prepare a text alone and by several machines, of which one is killed; return what happened."""
    part_bytes = n_bytes // PARTS + 1
    tokenizer = str(train_tokenizer(folder, text))
    alone = CorpusConfig(str(folder / "alone"), f"files:{text}", tokenizer)
    expected = prepare(alone, progress=False, workers=1, part_bytes=part_bytes).corpus_hash

    target = folder / "together"
    engine.start(CorpusConfig(str(target), f"files:{text}", tokenizer), part_bytes, machines)
    before = wait_for_parts(target, KILL_AFTER)
    engine.kill_one()
    again = encoded_again(target, before, engine)
    return {
        "machines": machines,
        "bytes": n_bytes,
        "parts": PARTS,
        "parts_complete_at_the_kill": len(before),
        "complete_parts_encoded_again": again,
        "is_equal": Manifest.load(target).corpus_hash == expected,
    }


def main() -> int:
    """Prepare, kill, compare, write; return 1 if the corpus differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("text", type=Path)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--machines", type=int, default=2)
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    folder = options.folder / "cluster"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    text = folder / "text.jsonl"
    n_bytes = write_text(options.text, text, options.megabytes * 10**6)
    engine = ENGINES[options.engine](folder)
    result = prepare_together(folder, text, n_bytes, engine, options.machines)

    print(json.dumps(result))
    command = shlex.join(["python", "-m", "benchmarks.cluster", *sys.argv[1:]])
    measured = Provenance.now()._asdict() | {"command": command}
    add_result(options.json, options.engine, {"measured": measured, **result})
    is_good = result["is_equal"] and not result["complete_parts_encoded_again"]
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
