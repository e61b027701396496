"""Preparation of a corpus: speed and memory by the number of processes, and the speed of reading.

    python -m benchmarks.corpus TEXT.jsonl [--megabytes 400] [--rounds 3] [--json FILE]

The text is repeated up to the given size, with a number in front of each document, so that none is
a duplicate. Its tokenizer is trained first. In every round the text is prepared with one process
and with one per core, in turns; each has one thread. The time is that of the whole command, from
its start to the complete corpus. Memory is the largest of any process of the command.
"""

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.step import reading
from benchmarks.ten_kills import SCRIPT
from lightning_sv.corpus import CorpusConfig, prepare
from lightning_sv.corpus.prepare import usable_cores
from lightning_sv.runs.provenance import Provenance

RESULTS = Path(__file__).parent / "results/corpus.json"
TOKENIZER = "bpe:8192"
#: bytes of text on which the tokenizer is trained
TRAINED_BYTES = 20_000_000
#: parts of the text, a multiple of the number of processes
PARTS = 16
ONE_THREAD = {
    "RAYON_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Measured:
    """One preparation: seconds of wall and CPU time, and the largest process in GB."""

    seconds: float
    cpu_seconds: float
    largest_gb: float


def write_text(source: Path, target: Path, n_bytes: int) -> int:
    """Write JSON lines of the documents of `source`, numbered, up to a size; return the size."""
    with source.open() as lines:
        documents = [json.loads(line)["text"] for line in lines]
    written = 0
    number = 0
    with target.open("w") as file:
        while written < n_bytes:
            text = f"{number} {documents[number % len(documents)]}"
            written += file.write(json.dumps({"text": text}) + "\n")
            number += 1
    return target.stat().st_size


def train_tokenizer(folder: Path, text: Path) -> Path:
    """Train the tokenizer on the start of the text; return its file."""
    config = CorpusConfig(
        str(folder / "sample"), f"files:{text}", TOKENIZER, max_bytes=TRAINED_BYTES
    )
    prepare(config, progress=False, workers=1)
    return folder / "sample/tokenizer.json"


def measure(target: Path, text: Path, tokenizer: Path, workers: int, part_bytes: int) -> Measured:
    """Prepare the text in a process of its own, and measure it."""
    arguments = [str(target), f"files:{text}", str(tokenizer), str(workers), str(part_bytes)]
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *arguments], env=os.environ | ONE_THREAD
    )
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.monotonic() - began
    if status != 0:
        raise SystemExit(f"a preparation with {workers} workers failed")
    cpu_seconds = usage.ru_utime + usage.ru_stime
    return Measured(seconds, cpu_seconds, usage.ru_maxrss / 1e6)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    counts = sorted({1, usable_cores()})
    measured: dict[int, list[Measured]] = {workers: [] for workers in counts}
    with tempfile.TemporaryDirectory(prefix="corpus-") as name:
        folder = Path(name)
        text = folder / "text.jsonl"
        n_bytes = write_text(options.text, text, options.megabytes * 10**6)
        tokenizer = train_tokenizer(folder, text)
        for _ in range(options.rounds):
            for workers in counts:
                target = folder / "corpus"
                shutil.rmtree(target, ignore_errors=True)
                found = measure(target, text, tokenizer, workers, n_bytes // PARTS + 1)
                measured[workers].append(found)
                print(f"{workers} processes: {found}", flush=True)
        tokens_per_s = reading(str(folder / "corpus"))

    summary = summarize(measured, n_bytes)
    for line in summary.values():
        print(line)
    print(f"reading: {tokens_per_s / 1e6:.1f} M tokens/s")
    provenance = Provenance.now()._asdict()
    command = shlex.join(["python", "-m", "benchmarks.corpus", *sys.argv[1:]])
    content = {
        "measured": provenance | {"command": command},
        "bytes": n_bytes,
        "by_processes": summary,
        "rounds": {str(workers): list(map(asdict, found)) for workers, found in measured.items()},
        "reading_tokens_per_s": tokens_per_s,
    }
    options.json.write_text(json.dumps(content, indent=2) + "\n")


def summarize(measured: dict[int, list[Measured]], n_bytes: int) -> dict[str, dict[str, float]]:
    """Return speed, memory, and speed per process relative to one process, by their number."""
    seconds_of_one = [found.seconds for found in measured[1]]
    summary = {}
    for workers, rounds in measured.items():
        speeds = [n_bytes / 1e6 / found.seconds for found in rounds]
        pairs = zip(seconds_of_one, rounds, strict=True)
        efficiencies = [one / (workers * found.seconds) for one, found in pairs]
        summary[str(workers)] = {
            "mb_per_s": round(statistics.median(speeds), 1),
            "share_of_linear": round(statistics.median(efficiencies), 3),
            "largest_gb": round(max(found.largest_gb for found in rounds), 3),
        }
    return summary


if __name__ == "__main__":
    main()
