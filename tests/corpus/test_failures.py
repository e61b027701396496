"""Preparations that fail: one sentence, nothing lost, and the next start goes on where it was."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from lightning_sv.corpus import CorpusConfig, Tokenizer, encode, prepare
from lightning_sv.corpus.job import Job, parts_folder
from lightning_sv.corpus.sources.document import Slice, Source
from lightning_sv.errors import ConfigError, RunError
from tests.conftest import file_size_limit, is_running
from tests.corpus.conftest import write_rows
from tests.corpus.test_parts import start

PART_BYTES = 5000


@dataclass
class Preparation:
    """A preparation of two files with a tokenizer from a file."""

    config: CorpusConfig
    folder: Path
    expected_hash: str

    def run(self, workers: int = 1, **settings: object) -> str:
        """Prepare the corpus; return its hash."""
        config = replace(self.config, **settings)  # type: ignore[arg-type]
        return prepare(config, progress=False, workers=workers, part_bytes=PART_BYTES).corpus_hash

    def complete(self) -> dict[str, int]:
        """Return the complete parts of the first file, and when each was written.

        A test changes the second file, whose parts are encoded again.
        """
        manifests = parts_folder(Path(self.config.dir)).glob("[0-9]*/part.json")
        first = [path for path in manifests if "b.jsonl" not in path.read_text()]
        return {path.parent.name: path.stat().st_mtime_ns for path in first}


@pytest.fixture
def preparation(tmp_path: Path, texts: list[str]) -> Preparation:
    Tokenizer.train(texts, 300).save(tmp_path)
    write_rows(tmp_path / "a.jsonl", texts[:150])
    write_rows(tmp_path / "b.jsonl", texts[150:])
    source = f"files:{tmp_path}/a.jsonl,{tmp_path}/b.jsonl"
    config = CorpusConfig(
        str(tmp_path / "corpus"), source, str(tmp_path / "tokenizer.json"), val_fraction=0.1
    )
    expected = prepare(replace(config, dir=str(tmp_path / "expected")), progress=False)
    return Preparation(config, tmp_path, expected.corpus_hash)


Failure = Callable[[Preparation, pytest.MonkeyPatch], None]


def after_two_parts(monkeypatch: pytest.MonkeyPatch, fail: Callable[[], None]) -> None:
    """Call `fail` before the third part is written."""
    check = encode.sync_files
    calls = []

    def count(folder: Path) -> None:
        calls.append(folder)
        if len(calls) > 2:
            fail()
        check(folder)

    monkeypatch.setattr(encode, "sync_files", count)


def full_disk(preparation: Preparation, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill() -> None:
        with file_size_limit(1), (preparation.folder / "full").open("wb", buffering=0) as file:
            file.write(b"123")
            file.write(b"4")

    after_two_parts(monkeypatch, fill)


def changed_text(preparation: Preparation, monkeypatch: pytest.MonkeyPatch) -> None:
    after_two_parts(monkeypatch, lambda: None)
    unchanged = Source.check_unchanged

    def touch(source: Source, slices: list[Slice]) -> None:
        if slices[0].name.endswith("b.jsonl"):
            os.utime(preparation.folder / "b.jsonl", (1, 1))
        unchanged(source, slices)

    monkeypatch.setattr(Source, "check_unchanged", touch)


def bad_line(preparation: Preparation, monkeypatch: pytest.MonkeyPatch) -> None:
    with (preparation.folder / "b.jsonl").open("a") as file:
        file.write("no json\n")


def dead_worker(preparation: Preparation, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker is killed as soon as it exists."""
    processes = []

    def kill_one() -> None:
        while not processes:
            processes.extend(multiprocessing.active_children())
            time.sleep(0.01)
        processes[0].kill()

    threading.Thread(target=kill_one, daemon=True).start()


def damaged_plan(preparation: Preparation, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers cannot read the plan; their reason is the error, not a lack of memory."""
    save = Job.save

    def save_without_tokenizer(job: Job) -> None:
        save(job)
        (job.folder / "tokenizer.json").unlink()

    monkeypatch.setattr(Job, "save", save_without_tokenizer)


def killed(preparation: Preparation, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of its own, in many small parts, is killed after some of them; its workers end."""
    folder = parts_folder(Path(preparation.config.dir))
    process = start(preparation.config, workers=2, part_bytes=500)
    wait_until(
        lambda: len(list(folder.glob("[0-9]*/part.json"))) >= 5 or process.poll() is not None
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) >= 2
    process.kill()
    process.wait()
    wait_until(lambda: not any(map(is_running, children)))
    raise RunError("killed")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("fail", "workers", "error", "keeps"),
    [
        pytest.param(killed, 2, RunError, True, id="killed"),
        pytest.param(full_disk, 1, ConfigError, True, id="full disk"),
        pytest.param(changed_text, 1, ConfigError, True, id="text changed while it is read"),
        pytest.param(bad_line, 2, ConfigError, True, id="bad line, two workers"),
        pytest.param(dead_worker, 2, RunError, False, id="a worker died"),
        pytest.param(damaged_plan, 2, ConfigError, False, id="damaged plan, two workers"),
    ],
)
def test_prepare_after_a_failure_keeps_complete_parts(
    fail: Failure, workers: int, error: type[Exception], keeps: bool, preparation: Preparation,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    fine = (preparation.folder / "b.jsonl").read_bytes()
    with monkeypatch.context() as patch, pytest.raises(error) as caught:
        fail(preparation, patch)
        preparation.run(workers)
    assert "\n" not in str(caught.value)
    kept = preparation.complete()
    assert bool(kept) == keeps
    assert not Path(preparation.config.dir).exists()

    (preparation.folder / "b.jsonl").write_bytes(fine)
    with pytest.raises(ConfigError, match="max_tokens"):  # so that the parts stay
        preparation.run(max_tokens=10**9)
    assert kept.items() <= preparation.complete().items()
    assert preparation.run() == preparation.expected_hash


@pytest.mark.parametrize("least", [0, 3], ids=["while workers start", "while they encode"])
def test_prepare_ctrl_c_ends_workers_at_once(least: int, preparation: Preparation) -> None:
    """Only the command prints a traceback, and parts that are submitted are not waited for."""
    folder = parts_folder(Path(preparation.config.dir))
    process = start(preparation.config, workers=2, part_bytes=500, stderr=subprocess.PIPE)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_until(
        lambda: (
            len(children.read_text().split()) >= 2
            and len(list(folder.glob("[0-9]*/part.json"))) >= least
        )
    )
    if not least:
        time.sleep(0.3)  # so that the workers import
    started = children.read_text().split()
    os.killpg(process.pid, signal.SIGINT)
    _, printed = process.communicate(timeout=120)
    wait_until(lambda: not any(map(is_running, started)))
    # Ctrl-C may come while the command handles another exception, such as one inside pathlib.
    chained = printed.count(b"During handling of the above exception")
    assert printed.count(b"Traceback") - chained == 1, printed.decode()
    assert printed.rstrip().endswith(b"KeyboardInterrupt")
    assert not Path(preparation.config.dir).exists()
    assert preparation.run() == preparation.expected_hash


def test_prepare_changed_file_replaces_its_parts(
    preparation: Preparation, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match="max_tokens"):  # so that the parts stay
        preparation.run(max_tokens=10**9)
    kept = preparation.complete()
    folder = parts_folder(Path(preparation.config.dir))
    changed = {path.name for path in folder.glob("[0-9]*-*") if path.is_dir()} - kept.keys()

    write_rows(preparation.folder / "b.jsonl", ["a different text", "and one more"])
    with pytest.raises(ConfigError, match="max_tokens"):
        preparation.run(max_tokens=10**9)
    named = {word for word in changed | kept.keys() if word in caplog.text}
    assert kept and changed and named == changed
    assert kept.items() <= preparation.complete().items()


def other_tokenizer(preparation: Preparation) -> None:
    Tokenizer.train(["some text " * 99], 257).save(preparation.folder)


def part_of_another_text(preparation: Preparation) -> None:
    """A folder with the number of a part, and the name of another text, is not used."""
    folder = parts_folder(Path(preparation.config.dir))
    first = next(folder.glob("00000-*/part.json")).parent
    shutil.move(first, folder / "00000-000000000000")


@pytest.mark.parametrize(
    ("settings", "change", "key"),
    [
        ({"tokenizer": "bpe:301"}, None, "tokenizer"),
        ({"val_fraction": 0.2}, None, "val_fraction"),
        ({"source": "files:other.jsonl"}, None, "source"),  # two corpora in one folder
        ({"max_tokens": 10**9}, None, "max_tokens"),  # more than the text has
        ({}, other_tokenizer, "tokenizer"),
        ({}, part_of_another_text, None),
    ],
)
def test_prepare_parts_of_something_else(
    settings: dict[str, object], change: Callable[[Preparation], None] | None, key: str | None,
    preparation: Preparation,
) -> None:  # fmt: skip
    """They are refused by the name of the setting, or not used; the parts stay."""
    with pytest.raises(ConfigError, match="max_tokens"):
        preparation.run(max_tokens=10**8)
    kept = preparation.complete()
    tokenizer = (preparation.folder / "tokenizer.json").read_bytes()
    if change is not None:
        change(preparation)
    if key is not None:
        with pytest.raises(ConfigError, match=f"^{key} is") as caught:
            preparation.run(**settings)
        assert "\n" not in str(caught.value)
        assert preparation.complete() == kept

    (preparation.folder / "tokenizer.json").write_bytes(tokenizer)
    assert preparation.run() == preparation.expected_hash
