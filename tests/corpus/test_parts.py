"""Parts: the same corpus for any number of parts, processes and interruptions; duplicates, limits,
bad input."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from litdata.streaming import Cache
from litdata.streaming.item_loader import TokensLoader

from lightning_sv.cli.names import resolve_names
from lightning_sv.cli.prepare import with_corpus
from lightning_sv.corpus import CorpusConfig, Manifest, Tokenizer, prepare
from lightning_sv.corpus import duplicates as duplicates_module
from lightning_sv.corpus.duplicates import keep_documents
from lightning_sv.corpus.estimate import sufficient_tokens
from lightning_sv.corpus.job import Job, parts_folder
from lightning_sv.corpus.manifest import Shard
from lightning_sv.corpus.parts import DOCUMENT
from lightning_sv.corpus.shards import plan_shards, write_index, write_shard
from lightning_sv.corpus.sources.document import Document
from lightning_sv.errors import ConfigError
from tests.corpus.conftest import shard_ids

PART_BYTES = 5000


@pytest.fixture
def repeated(tmp_path: Path, texts: list[str]) -> CorpusConfig:
    """Two files with duplicates within and between parts."""
    for name, rows in (
        ("a.jsonl", texts[:200] + texts[150:160]),
        ("b.jsonl", texts[100:300] + texts[:3]),
    ):
        (tmp_path / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    source = f"files:{tmp_path}/a.jsonl,{tmp_path}/b.jsonl"
    return CorpusConfig(
        str(tmp_path / "corpus"), source, "bpe:300", val_fraction=0.1, chunk_bytes="8KB"
    )


def prepared(config: CorpusConfig, name: str, **options: Any) -> Manifest:
    config = replace(config, dir=str(Path(config.dir).with_name(name)))
    return prepare(config, progress=False, **options)


def contents(manifest: Manifest) -> dict[str, object]:
    """Return a manifest without the names of documents, which count lines from the start of a
    part."""
    return manifest.to_dict() | {"manifest_sha256": None, "held_out": len(manifest.held_out)}


def test_prepare_any_parts_and_workers_give_the_same_corpus(
    repeated: CorpusConfig, texts: list[str]
) -> None:
    whole = prepared(repeated, "whole", workers=1)
    assert whole.duplicates == 113 and whole.train.documents + whole.val.documents == len(texts)
    for number, options in enumerate(({"workers": 1}, {"workers": 2}, {"workers": 4})):
        parts = prepared(repeated, f"parts{number}", part_bytes=PART_BYTES, **options)
        assert contents(parts) == contents(whole)


@pytest.mark.parametrize("max_bytes", [1, 3000, 30_000, 55_000, 10**9])
def test_prepare_any_parts_end_at_the_same_document(
    repeated: CorpusConfig, texts: list[str], max_bytes: int
) -> None:
    """The documents are those of a set that is filled in order until one would exceed the limit."""
    expected: list[str] = []
    for text in dict.fromkeys(texts):
        if sum(len(row.encode()) for row in expected) + len(text.encode()) > max_bytes:
            break
        expected.append(text)
    config = replace(repeated, max_bytes=max_bytes, tokenizer="bpe:257")
    if not expected:
        with pytest.raises(ConfigError, match="max_bytes"):
            prepared(config, "none")
        return
    whole = prepared(config, "whole", workers=1)
    parts = prepared(config, "parts", part_bytes=PART_BYTES, workers=1)
    assert contents(parts) == contents(whole)
    assert whole.train.bytes + whole.val.bytes == sum(len(text.encode()) for text in expected)


def test_prepare_max_tokens_grows_by_the_parts_that_it_lacks(
    repeated: CorpusConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = prepared(repeated, "whole", workers=1)
    total = whole.train.tokens + whole.val.tokens
    small = prepared(
        replace(repeated, max_tokens=total // 3), "grows", part_bytes=PART_BYTES, workers=1
    )
    assert total // 3 - 400 < small.train.tokens + small.val.tokens <= total // 3
    folder = tmp_path / "grows.parts"
    before = {path: path.stat().st_mtime_ns for path in folder.glob("[0-9]*/part.json")}
    assert 0 < len(before) < len(Job.load(folder).parts)

    large = prepared(replace(repeated, max_tokens=total), "grows", workers=1)
    assert large.corpus_hash == whole.corpus_hash
    assert all(path.stat().st_mtime_ns == time_ns for path, time_ns in before.items())
    smaller = prepared(replace(repeated, max_tokens=total // 3), "grows", workers=1)
    assert smaller.corpus_hash == small.corpus_hash

    with pytest.raises(ConfigError, match=rf"max_tokens is .*{total:,}"):
        prepared(replace(repeated, max_tokens=total + 1), "grows", workers=1)
    assert Manifest.load(tmp_path / "grows").corpus_hash == small.corpus_hash


def test_prepare_for_a_run_tells_how_much_suffices(
    repeated: CorpusConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """The offered number gives a corpus of the first parts, without an offer for one that is whole
    anyway."""
    caplog.set_level("INFO")
    whole = prepared(repeated, "whole", workers=1, needed_tokens=10**9)
    assert not caplog.messages  # a single part
    total = whole.train.tokens + whole.val.tokens
    offer = "--data.corpus.max_tokens 3000 "
    for max_tokens, needed, is_offered in (
        (None, 3000, True),
        (2000, 3000, False),
        (None, 10 * total, False),
    ):
        caplog.clear()
        config = replace(repeated, max_tokens=max_tokens)
        prepared(
            config, f"{max_tokens}-{needed}", part_bytes=PART_BYTES, workers=1, needed_tokens=needed
        )
        assert any(f"{needed:,} tokens" in message for message in caplog.messages)
        assert (offer in " ".join(caplog.messages)) == is_offered


def test_sufficient_tokens_feed_a_run(repeated: CorpusConfig) -> None:
    sequences, seq_len = 200, 31
    enough = sufficient_tokens(sequences, seq_len, repeated.val_fraction)
    manifest = prepared(replace(repeated, max_tokens=enough), "enough", workers=1)
    assert sequences <= manifest.train.sequences(seq_len) < 1.2 * sequences


def test_training_by_name_leaves_a_part_of_a_text_as_it_is(
    repeated: CorpusConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only `prepare` grows it. A text that is prepared for a run has the settings of its command
    line."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf/data").mkdir(parents=True)
    settings = {
        "dir": "data/some",
        "source": repeated.source,
        "tokenizer": "bpe:300",
        "val_fraction": 0.1,
    }
    (tmp_path / "conf/data/some.yaml").write_text(json.dumps({"data": {"corpus": settings}}))
    model = str(tmp_path / "model.yaml")
    Path(model).write_text(
        "model: {backbone: {d_model: 16, n_layer: 1, n_head: 1, vocab_size: 300}}"
    )
    options = [
        "--config",
        model,
        "--model.optim.lr=0.01",
        "--data.seq_len=8",
        "--data.global_batch=2",
        "--trainer.max_steps=9",
    ]
    for words in (["--data.corpus.max_tokens=4000"], []):
        with_corpus(resolve_names(["--data", "some", *options, *words]))
        manifest = Manifest.load("data/some")
        assert manifest.settings["max_tokens"] == 4000
        assert manifest.train.tokens + manifest.val.tokens <= 4000


@dataclass
class Table:
    """A part with hashes, and bytes equal to tokens."""

    hashes: list[int]

    def documents(self) -> np.ndarray:
        table = np.zeros(len(self.hashes), DOCUMENT)
        table["digest"] = np.array([(number, 7 * number) for number in self.hashes]).reshape(-1, 2)
        table["n_bytes"] = table["train_tokens"] = np.array(self.hashes) + 1
        return table


@pytest.mark.parametrize("bucket", [3, 1000])
def test_keep_documents_is_a_set_that_is_filled_in_order(
    bucket: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duplicates_module, "BUCKET", bucket)
    draw = random.Random(bucket)
    for _ in range(30):
        parts = [
            Table(draw.choices(range(20), k=draw.randint(0, 12))) for _ in range(draw.randint(1, 6))
        ]
        limit = draw.choice([None, 15, 60, 10_000])
        seen: set[int] = set()
        duplicates = 0
        is_over = False
        expected = []
        for part in parts:
            for number in part.hashes:
                is_over |= (
                    number not in seen
                    and limit is not None
                    and sum(seen) + len(seen) + number + 1 > limit
                )
                expected.append(number not in seen and not is_over)
                duplicates += number in seen and not is_over
                if expected[-1]:
                    seen.add(number)
        for limits in (
            {"max_bytes": limit, "max_tokens": None},
            {"max_bytes": None, "max_tokens": limit},
        ):
            kept = keep_documents(parts, **limits)
            found = [bool(row) for rows in kept.rows for row in rows]
            assert found == expected
            assert (kept.duplicates, kept.is_limited) == (duplicates, is_over)


def test_plan_and_write_shards_as_litdata_does(tmp_path: Path) -> None:
    """The files and the index are those of litdata's own writer, also for documents larger than a
    shard."""
    draw = random.Random(0)
    for number in range(20):
        documents = [
            np.array(draw.choices(range(60_000), k=draw.choice([1, 3, 10, 50, 70])), np.uint16)
            for _ in range(60)
        ]
        chunk_bytes = draw.choice([80, 100, 101, 200])
        theirs, ours = tmp_path / f"theirs{number}", tmp_path / f"ours{number}"
        cache = Cache(str(theirs), chunk_bytes=chunk_bytes, item_loader=TokensLoader())
        with warnings.catch_warnings(action="ignore"):
            for index, ids in enumerate(documents):
                cache[index] = ids
            cache.done()

        ours.mkdir()
        sizes = np.array([ids.nbytes for ids in documents])
        shards = []
        for shard, spans in enumerate(plan_shards(np.split(sizes, [20, 20, 50]), chunk_bytes)):
            starts = [0, 20, 20, 50]
            rows = [
                row + starts[span.part] for span in spans for row in range(span.start, span.stop)
            ]
            content = write_shard(
                ours / f"chunk-0-{shard}.bin", [sizes[rows]], [documents[row] for row in rows]
            )
            del content["largest_token"]
            shards.append(Shard(file=f"train/chunk-0-{shard}.bin", **content))
        write_index(ours, shards, chunk_bytes, np.dtype(np.uint16))
        (index_file,) = theirs.glob("*index.json")
        index_file.rename(theirs / "index.json")
        assert json.loads((ours / "index.json").read_text()) == json.loads(
            (theirs / "index.json").read_text()
        )
        assert {path.name: path.read_bytes() for path in ours.glob("*.bin")} == {
            path.name: path.read_bytes() for path in theirs.glob("*.bin")
        }


SCRIPT = """
import sys
from lightning_sv.corpus import CorpusConfig, prepare
dir, source, workers, part_bytes = sys.argv[1:]
config = CorpusConfig(dir, source, "bpe:300", val_fraction=0.1, chunk_bytes="8KB")
prepare(config, progress=False, workers=int(workers), part_bytes=int(part_bytes))
"""


def start(config: CorpusConfig, workers: int, part_bytes: int = PART_BYTES) -> subprocess.Popen:
    command = [
        sys.executable,
        "-c",
        SCRIPT,
        config.dir,
        config.source,
        str(workers),
        str(part_bytes),
    ]
    return subprocess.Popen(command, start_new_session=True)


def wait_for_parts(folder: Path, number: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while len(list(folder.glob("[0-9]*/part.json"))) < number and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_prepare_killed_goes_on_where_it_was(repeated: CorpusConfig, tmp_path: Path) -> None:
    whole = prepared(repeated, "whole", workers=1)
    folder = parts_folder(Path(repeated.dir))
    process = start(repeated, workers=1, part_bytes=500)
    wait_for_parts(folder, 5, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    kept = {path: path.stat().st_mtime_ns for path in folder.glob("[0-9]*/part.json")}
    assert kept and not Path(repeated.dir).exists()
    grows = replace(repeated, max_tokens=10**6)  # so that the parts stay
    with pytest.raises(ConfigError, match="max_tokens"):
        prepare(grows, progress=False, workers=1)
    assert all(path.stat().st_mtime_ns == time_ns for path, time_ns in kept.items())
    assert prepare(repeated, progress=False).corpus_hash == whole.corpus_hash
    assert not folder.exists()


def test_prepare_two_processes_encode_each_part_once(repeated: CorpusConfig) -> None:
    whole = prepared(repeated, "whole", workers=1)
    processes = [start(repeated, workers=2, part_bytes=500) for _ in range(2)]
    assert [process.wait(300) for process in processes] == [0, 0]
    assert contents(Manifest.load(repeated.dir)) == contents(whole)
    assert not parts_folder(Path(repeated.dir)).exists()


def parts_of(config: CorpusConfig, texts: list[str]) -> Path:
    """Prepare all parts but not the corpus, because it is larger than the text; return their
    folder."""
    with pytest.raises(ConfigError, match="max_tokens"):
        prepare(replace(config, max_tokens=10**6), progress=False, workers=1, part_bytes=PART_BYTES)
    return parts_folder(Path(config.dir))


def test_prepare_text_changed_half_way_keeps_the_other_parts(
    repeated: CorpusConfig, tmp_path: Path, texts: list[str]
) -> None:
    """The tokenizer is trained again; here it is a file."""
    Tokenizer.train(texts, 300).save(tmp_path / "tokenizer")
    repeated = replace(repeated, tokenizer=str(tmp_path / "tokenizer/tokenizer.json"))
    folder = parts_of(repeated, texts)
    before = {path.name for path in folder.glob("0*-*") if path.is_dir()}
    with (tmp_path / "b.jsonl").open("a") as file:
        file.write(json.dumps({"text": "one more document"}) + "\n")
    parts_of(repeated, texts)
    after = {path.name for path in folder.glob("0*-*") if path.is_dir()}
    assert before & after and before - after and after - before
    fresh = prepared(repeated, "fresh", workers=1)
    assert prepare(repeated, progress=False).corpus_hash == fresh.corpus_hash

    repeated = replace(repeated, dir=str(tmp_path / "second"))
    parts_of(repeated, texts)
    Tokenizer.train(texts, 301).save(tmp_path / "tokenizer")
    with pytest.raises(ConfigError, match="tokenizer is .*changed"):
        prepare(repeated, progress=False)


def test_prepare_shards_have_the_tokens_of_the_documents(
    repeated: CorpusConfig, texts: list[str]
) -> None:
    prepare(repeated, progress=False, workers=1, part_bytes=PART_BYTES)
    tokenizer = Tokenizer.load(repeated.dir)
    held_out = {True: list[int](), False: list[int]()}
    for text in texts:
        held_out[Document.from_text(text, "").held_out(0.1)] += [
            *tokenizer.encode(text),
            tokenizer.eot,
        ]
    for split, ids in (("train", held_out[False]), ("val", held_out[True])):
        assert np.concatenate(shard_ids(Path(repeated.dir), split)).tolist() == ids
