"""Preparation: the written files, atomic and single writing, and refused inputs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from filelock import FileLock

from lightning_sv import atomic
from lightning_sv.__main__ import main
from lightning_sv.corpus import CorpusConfig, Manifest, Tokenizer, check_corpus, prepare
from lightning_sv.corpus.sources.document import Document
from lightning_sv.settings.parse import parse_run
from tests.corpus.conftest import shard_ids


def _ids(folder: Path, split: str) -> list[int]:
    ids: list[int] = np.concatenate(shard_ids(folder, split)).tolist()
    return ids


def test_shards_hold_the_documents_in_order(corpus: Path, manifest: Manifest, texts: list[str]) -> None:
    library = tokenizers.Tokenizer.from_file(str(corpus / "tokenizer.json"))
    expected: dict[str, list[int]] = {"train": [], "val": []}
    held: dict[str, list[str]] = {"train": [], "val": []}
    for text in texts:
        name = "val" if Document.from_text(text, "").held_out(0.1) else "train"
        held[name].append(text)
        expected[name] += [*library.encode(text).ids, library.token_to_id("<|endoftext|>")]
    assert len(manifest.train.shards) > 2
    for name, split in manifest.splits.items():
        assert _ids(corpus, name) == expected[name]
        assert split.documents == len(held[name]) > 0
        assert split.tokens == len(expected[name])
        assert split.bytes == sum(len(text.encode()) for text in held[name])
        assert split.largest_token == max(expected[name])
        assert all(2 * shard.tokens <= 16 << 10 for shard in split.shards)


def test_a_corpus_is_a_layer_of_a_run(config: CorpusConfig, capsys: pytest.CaptureFixture[str]) -> None:
    """The files of `prepare` contain all that training needs: tokenizer, and a vocabulary that contains its ids."""
    made = prepare(config, progress=False)
    layer = str(Path(config.dir) / "corpus.yaml")
    files = ["conf/base.yaml", "conf/model/tiny.yaml", layer]
    model, data, _ = parse_run([word for file in files for word in ("--config", file)])
    assert data.manifest == made
    assert made.vocab_size <= model.backbone.vocab_size < made.vocab_size + 64
    assert main(["prepare", "--config", layer]) == 0  # there already
    assert made.corpus_hash[:12] in capsys.readouterr().out
    args = ["fit", *(word for file in files[:2] for word in ("--config", file)), "--data.corpus.dir", config.dir]
    assert main(args) == 2 and f"--config {layer} sets it" in capsys.readouterr().err


def test_same_settings_do_no_work_and_others_are_refused(config: CorpusConfig, jsonl: Path) -> None:
    first = prepare(config, progress=False)
    times = {path: path.stat().st_mtime_ns for path in Path(config.dir).rglob("*")}
    assert prepare(config, progress=False) == first
    assert {path: path.stat().st_mtime_ns for path in Path(config.dir).rglob("*")} == times
    with pytest.raises(ValueError, match="val_fraction"):
        prepare(replace(config, val_fraction=0.2), progress=False)
    assert Manifest.load(config.dir) == first
    (Path(config.dir) / "manifest.json").unlink()
    with pytest.raises(ValueError, match="no prepared corpus"):
        prepare(config, progress=False)
    assert first.licence == "CC0-1.0" and first.duplicates == 0
    assert first.to_dict()["settings"]["source"] == f"files:{jsonl}"


def test_content_is_identified_by_one_hash(config: CorpusConfig, tmp_path: Path, manifest: Manifest) -> None:
    """The hash is equal for equal content in a different folder, and different for other shards."""
    again = prepare(replace(config, dir=str(tmp_path / "again")), progress=False)
    other = prepare(replace(config, dir=str(tmp_path / "other"), chunk_bytes="8KB"), progress=False)
    assert again.corpus_hash == manifest.corpus_hash != other.corpus_hash


def test_repetitions_are_dropped(config: CorpusConfig, jsonl: Path, tmp_path: Path, manifest: Manifest) -> None:
    twice = tmp_path / "twice.jsonl"
    twice.write_bytes(jsonl.read_bytes() * 2)
    result = prepare(replace(config, source=f"files:{twice}"), progress=False)
    assert result.duplicates == 300
    assert result.corpus_hash == manifest.corpus_hash


def test_vocabularies_over_16_bits(config: CorpusConfig, tmp_path: Path) -> None:
    vocab = {f"w{number}": number for number in range(70_000)} | {"<|endoftext|>": 70_000}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="w0"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()  # type: ignore[assignment]
    library.save(str(tmp_path / "big.json"))
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"w{number} w69999 w65536 " * 5)
    settings = {"source": f"files:{tmp_path}/*.txt", "tokenizer": str(tmp_path / "big.json"), "val_fraction": 0.2}
    result = prepare(replace(config, **settings), progress=False)  # type: ignore[arg-type]
    assert (result.dtype, result.vocab_size, result.eot) == ("uint32", 70_001, 70_000)
    assert result.train.largest_token == 70_000
    first = next(n for n in range(40) if _ids(Path(config.dir), "train")[0] == n)
    assert _ids(Path(config.dir), "train")[:16] == [first, 69_999, 65_536] * 5 + [70_000]
    check_corpus(result, config.dir, vocab_size=70_001, seq_len=8, tokenizer=str(tmp_path / "big.json"))


def test_the_end_of_a_lone_document_is_held_out(config: CorpusConfig, tmp_path: Path, texts: list[str]) -> None:
    """From the start of a line on, unseen by the tokenizer as well; both parts together are the document."""
    text = "".join(text.replace("\n", " ") + "\n" for text in texts)
    for name in ("one.txt", "same.txt"):
        (tmp_path / name).write_text(text)
    lone = replace(config, source=f"files:{tmp_path}/*.txt")
    made = prepare(lone, progress=False)
    tokenizer = Tokenizer.load(config.dir)
    train, val = (tokenizer.decode(_ids(Path(config.dir), name)) for name in ("train", "val"))
    start, end = (part.removesuffix("<|endoftext|>") for part in (train, val))
    assert start + end == text and start.endswith("\n") and 0.1 <= len(end) / len(text) < 0.11
    assert (made.train.documents, made.val.documents, made.duplicates) == (1, 1, 1)
    assert made.train.bytes + made.val.bytes == len(text.encode())
    assert made.tokenizer_sha256 == Tokenizer.train([start], 300).sha256
    check_corpus(made, config.dir, vocab_size=300, seq_len=64)


def test_too_little_text_is_refused_and_leaves_nothing(config: CorpusConfig, tmp_path: Path) -> None:
    for text, more, message in (
        ("", {}, "there is no document; add some"),
        ("a single document", {"max_bytes": 3}, "there is no document within max_bytes=3; raise it"),
        ("x", {}, "no document has more than a single character"),
    ):
        (tmp_path / "one.txt").write_text(text)
        one = replace(config, source=f"files:{tmp_path}/one.txt", tokenizer="bpe:257", **more)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"source=files:.*one.txt: {message}"):
            prepare(one, progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.txt"]


def test_killed_in_the_middle_it_leaves_nothing_that_looks_finished(
    config: CorpusConfig, tmp_path: Path, manifest: Manifest
) -> None:
    script = textwrap.dedent(
        """
        import json, sys, time
        from lightning_sv.corpus import CorpusConfig
        from lightning_sv.corpus import prepare as _
        module = sys.modules["lightning_sv.corpus.prepare"]

        def wait(*args):
            print("all shards are written", flush=True)
            time.sleep(60)

        module.corpus_hash = wait
        module.prepare(CorpusConfig(**json.loads(sys.argv[1])), progress=False)
        """
    )
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", script, json.dumps(asdict(config))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stdout is not None and "written" in process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
    assert (tmp_path / ".corpus.partial" / "train" / "index.json").is_file()
    assert not Path(config.dir).exists()
    with pytest.raises(ValueError, match=r"manifest\.json"):
        Manifest.load(config.dir)
    assert prepare(config, progress=False).corpus_hash == manifest.corpus_hash
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus"]


def test_a_folder_that_cannot_be_written_is_named(config: CorpusConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"preparing dir=.*file/corpus failed"):
        prepare(replace(config, dir=str(tmp_path / "file" / "corpus")), progress=False)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that even root cannot write")
def test_a_lock_that_cannot_be_made_is_not_waited_for(config: CorpusConfig) -> None:
    def hangs(*_: object) -> None:
        raise AssertionError("it waits for a lock that cannot be made")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(10)
    try:
        with pytest.raises(ValueError, match=r"preparing dir=/proc/x failed .*check the path, its permissions"):
            prepare(replace(config, dir="/proc/x"), progress=False)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_a_wait_for_another_prepare_is_said(
    config: CorpusConfig, tmp_path: Path, manifest: Manifest, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(atomic, "_SILENT_WAIT_S", 0.01)
    held = FileLock(tmp_path / ".corpus.lock")
    held.acquire()
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(prepare, config, progress=False)
        deadline, said = time.monotonic() + 10, ""
        while "waiting" not in said and time.monotonic() < deadline:
            time.sleep(0.02)
            said += capsys.readouterr().err
        assert not made.done() and not Path(config.dir).exists()
        held.release()
        assert made.result().corpus_hash == manifest.corpus_hash
    assert said == f"waiting for another prepare of {config.dir} (Ctrl-C ends the wait)\n"
