"""Ten kills of a preparation, at random times.

    python -m benchmarks.ten_kills MEGABYTES [--workers 1 2 4] [--json FILE]

Documents are made here. With each number of workers a preparation is killed with its workers, and
started again. At the end the corpus must be that of an undisturbed preparation, and no complete
part may have been encoded again. Each number of workers is printed as a line of JSON and written
to the file when it is done; the file keeps its other entries.
"""

import argparse
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lightning_sv.atomic import write_atomically
from lightning_sv.corpus import CorpusConfig, Manifest, prepare
from lightning_sv.corpus.job import parts_folder
from lightning_sv.runs.provenance import Provenance

RESULTS = Path(__file__).parent / "results/ten_kills.json"
KILLS = 10
FILES = 8
PARTS = 40
WORDS = 20_000
#: seconds in which a process has surely started
START_S = 8
SCRIPT = """
import sys
from lightning_sv.corpus import CorpusConfig, prepare
dir, source, tokenizer, workers, part_bytes = sys.argv[1:]
config = CorpusConfig(dir, source, tokenizer)
prepare(config, progress=False, workers=int(workers), part_bytes=int(part_bytes))
"""


def write_documents(folder: Path, n_bytes: int) -> None:
    """Write JSONL files of random words; every tenth document repeats an earlier one."""
    generator = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(generator.choices(letters, k=generator.randint(2, 9))) for _ in range(WORDS)]
    line = ""
    for number in range(FILES):
        written = 0
        with (folder / f"{number}.jsonl").open("w") as file:
            while written < n_bytes // FILES:
                if not line or generator.random() > 0.1:
                    text = " ".join(generator.choices(words, k=generator.randint(50, 2000)))
                    line = json.dumps({"text": text}) + "\n"
                written += file.write(line)


def start(target: Path, texts: Path, workers: int, part_bytes: int) -> subprocess.Popen[bytes]:
    """Start a preparation in a process group of its own."""
    tokenizer = str(texts / "tokenizer.json")
    arguments = [str(target), f"files:{texts}", tokenizer, str(workers), str(part_bytes)]
    return subprocess.Popen([sys.executable, "-c", SCRIPT, *arguments], start_new_session=True)


def train_tokenizer(folder: Path, texts: Path) -> None:
    """Train a tokenizer on one file first, because a kill while it is trained loses no part."""
    config = CorpusConfig(
        str(folder / "small"), f"files:{texts}/0.jsonl", "bpe:1000", max_bytes=10**6
    )
    prepare(config, progress=False, workers=1)
    shutil.copy(folder / "small" / "tokenizer.json", texts)


def seconds_of(process: subprocess.Popen[bytes]) -> float:
    """Wait for a preparation that must succeed; return how long it took."""
    began = time.monotonic()
    code = process.wait()
    if code:
        raise SystemExit(f"a preparation ended with exit code {code}")
    return time.monotonic() - began


def complete_parts(target: Path) -> dict[str, int]:
    """Return the complete parts, and when each was written."""
    tables = parts_folder(target).glob("[0-9]*/documents.npy")
    return {path.parent.name: path.stat().st_mtime_ns for path in tables}


def wait_for_a_part(process: subprocess.Popen[bytes], target: Path) -> None:
    """Return when a started preparation has completed one more part, or has ended."""
    before = len(complete_parts(target))
    while process.poll() is None and len(complete_parts(target)) == before:
        time.sleep(0.2)


def kill(process: subprocess.Popen[bytes], after: float) -> bool:
    """Kill a preparation and its workers after some seconds; return False if it had ended."""
    time.sleep(after)
    is_running = process.poll() is None
    if is_running:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return is_running


def disturbed(
    target: Path, texts: Path, workers: int, part_bytes: int, seconds: float
) -> dict[str, object]:
    """Prepare with kills; return what happened.

    `seconds` is the time of an undisturbed preparation. Every other kill comes at any time from the
    start on, also before the first part is complete. The others come after this start has completed
    a part, because otherwise a slow machine would never get on.
    """
    generator = random.Random(workers)
    kills = 0
    encoded_again = 0
    kept: dict[str, int] = {}
    seconds_of_a_part = seconds / PARTS
    for number in range(KILLS):
        process = start(target, texts, workers, part_bytes)
        if number % 2 == 0:
            after = generator.uniform(0, START_S + seconds_of_a_part)
        else:
            wait_for_a_part(process, target)
            after = generator.uniform(0, 2 * seconds_of_a_part)
        if not kill(process, after):
            break
        kills += 1
        now = complete_parts(target)
        encoded_again += sum(now.get(name, written) != written for name, written in kept.items())
        kept |= now
    seconds_of(start(target, texts, workers, part_bytes))
    return {
        "workers": workers,
        "kills": kills,
        "parts_kept_at_the_last_kill": len(kept),
        "complete_parts_encoded_again": encoded_again,
        "corpus_hash": Manifest.load(target).corpus_hash,
    }


def add_result(file: Path, key: str, result: dict[str, object]) -> None:
    """Write a result into the file under its key, next to those of other runs."""
    results = json.loads(file.read_text()) if file.exists() else {}
    results[key] = result
    write_atomically(file, json.dumps(results, indent=2) + "\n")


def kill_preparations(folder: Path, megabytes: int, worker_counts: list[int], file: Path) -> bool:
    """Run the kills; return False if a corpus differs or a complete part was encoded again."""
    command = shlex.join(["python", "-m", "benchmarks.ten_kills", *sys.argv[1:]])
    measured = Provenance.now()._asdict() | {"command": command}
    n_bytes = megabytes * 10**6
    part_bytes = n_bytes // PARTS
    texts = folder / "texts"
    texts.mkdir()
    write_documents(texts, n_bytes)
    train_tokenizer(folder, texts)
    seconds = seconds_of(start(folder / "undisturbed", texts, 1, part_bytes))
    expected = Manifest.load(folder / "undisturbed").corpus_hash

    is_good = True
    for workers in worker_counts:
        result = disturbed(folder / f"workers-{workers}", texts, workers, part_bytes, seconds)
        is_equal = result["corpus_hash"] == expected
        result |= {"megabytes": megabytes, "is_equal": is_equal, "measured": measured}
        print(json.dumps(result), flush=True)
        add_result(file, f"{megabytes} MB, workers: {workers}", result)
        if not is_equal or result["complete_parts_encoded_again"]:
            is_good = False
    return is_good


def main() -> int:
    """Parse the arguments; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("megabytes", type=int)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--json", type=Path, default=RESULTS, help="file of the results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ten-kills-") as folder:
        is_good = kill_preparations(Path(folder), options.megabytes, options.workers, options.json)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
