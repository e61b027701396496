"""Preparations that fail: one sentence, nothing lost, and the next start goes on where it was."""

import importlib
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
from lightning_sv.corpus.job import parts_folder
from lightning_sv.corpus.sources.document import Slice, Source
from lightning_sv.errors import ConfigError, RunError
from tests.conftest import file_size_limit, is_running
from tests.corpus.conftest import write_rows
from tests.corpus.test_parts import start

PART_BYTES = 5000


def stop(*args: object, **settings: object) -> None:
    raise RunError("stop")


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

    def encode(self, monkeypatch: pytest.MonkeyPatch, **settings: object) -> None:
        """Encode the parts, and stop before the corpus is written."""
        with monkeypatch.context() as patch, pytest.raises(RunError, match="stop"):
            patch.setattr(importlib.import_module("lightning_sv.corpus.prepare"), "publish", stop)
            self.run(**settings)

    def complete(self) -> dict[str, int]:
        """Return the complete parts, and when each was written."""
        tables = parts_folder(Path(self.config.dir)).glob("[0-9]*/documents.npy")
        return {path.parent.name: path.stat().st_mtime_ns for path in tables}


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


def killed(preparation: Preparation, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of its own, in many small parts, is killed after some of them; its workers end."""
    folder = parts_folder(Path(preparation.config.dir))
    process = start(preparation.config, workers=2, part_bytes=500)
    wait_until(
        lambda: len(list(folder.glob("[0-9]*/documents.npy"))) >= 5 or process.poll() is not None
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
    preparation.encode(monkeypatch)
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
            and len(list(folder.glob("[0-9]*/documents.npy"))) >= least
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


def test_prepare_of_a_changed_file_uses_the_parts_of_the_other(
    preparation: Preparation, monkeypatch: pytest.MonkeyPatch
) -> None:
    preparation.encode(monkeypatch)
    kept = preparation.complete()
    write_rows(preparation.folder / "b.jsonl", ["a different text", "and one more"])
    preparation.encode(monkeypatch)
    complete = preparation.complete()
    assert kept.items() < complete.items()
    assert len(complete) <= len(kept) + 2 < 2 * len(kept)


def other_text(preparation: Preparation) -> None:
    write_rows(preparation.folder / "a.jsonl", [f"text {number}" for number in range(99)])


def other_tokenizer(preparation: Preparation) -> None:
    Tokenizer.train(["some text " * 99], 257).save(preparation.folder)


@pytest.mark.parametrize(
    ("settings", "change"),
    [
        ({"tokenizer": "bpe:301"}, None),
        ({"val_fraction": 0.2}, None),
        ({}, other_text),
        ({}, other_tokenizer),
    ],
)
def test_prepare_parts_of_something_else_are_not_used(
    settings: dict[str, object], change: Callable[[Preparation], None] | None,
    preparation: Preparation, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """They stay for the settings, text and tokenizer with which they were encoded."""
    preparation.encode(monkeypatch)
    kept = preparation.complete()
    before = {path: path.read_bytes() for path in preparation.folder.glob("*.json*")}
    if change is not None:
        change(preparation)
    preparation.encode(monkeypatch, **settings)
    assert kept.items() < preparation.complete().items()
    other = {"dir": str(preparation.folder / "other"), **settings}
    assert preparation.run(**settings) == preparation.run(**other)

    shutil.rmtree(preparation.config.dir)
    for path, content in before.items():
        path.write_bytes(content)
    assert preparation.run() == preparation.expected_hash
