"""Preparation: the written files, atomic and single writing, refused inputs, and changes of the
text."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from filelock import FileLock

from lightning_sv import atomic
from lightning_sv.corpus import CorpusConfig, Manifest, Tokenizer, check_corpus, prepare
from lightning_sv.corpus.sources.document import Document
from lightning_sv.errors import ConfigError
from lightning_sv.lit.run_arguments import parse_run
from lightning_sv.settings.data import DataConfig
from tests.conftest import Refused, Told
from tests.corpus.conftest import shard_ids


def _ids(folder: Path, split: str) -> list[int]:
    ids: list[int] = np.concatenate(shard_ids(folder, split)).tolist()
    return ids


def test_prepare_shards_contain_the_documents_in_order(
    corpus: Path, manifest: Manifest, texts: list[str]
) -> None:
    library = tokenizers.Tokenizer.from_file(str(corpus / "tokenizer.json"))
    expected: dict[str, list[int]] = {"train": [], "val": []}
    held: dict[str, list[str]] = {"train": [], "val": []}
    for text in texts:
        name = Document.from_text(text, "").split(0.1)
        held[name].append(text)
        expected[name] += [*library.encode(text).ids, library.token_to_id("<|endoftext|>")]
    assert len(manifest.train.shards) > 2
    for name, split in manifest.splits.items():
        assert _ids(corpus, name) == expected[name]
        assert split.documents == len(held[name]) > 0
        assert split.tokens == len(expected[name])
        assert split.bytes == sum(len(text.encode()) for text in held[name])
        assert all(2 * shard.tokens <= 16 << 10 for shard in split.shards)


def test_prepare_layer_sets_corpus_and_vocabulary(
    config: CorpusConfig, told: Told, refused: Refused
) -> None:
    """The files of `prepare` contain all that training needs: tokenizer, and a vocabulary that
    contains its ids."""
    made = prepare(config, progress=False)
    layer = str(Path(config.dir) / "corpus.yaml")
    files = ["conf/base.yaml", "conf/model/tiny.yaml"]
    words = ["--config", files[0], "--config", files[1], "--config", layer]
    model, data, _ = parse_run(words)
    assert data.manifest == made
    assert made.vocab_size <= model.backbone.vocab_size < made.vocab_size + 64
    assert made.corpus_hash[:12] in told("prepare", "--config", layer)  # there already
    args = ["--config", files[0], "--config", files[1], "--data.corpus.dir", config.dir]
    assert "corpus.yaml" in refused("fit", *args)


def test_prepare_again_does_no_work_and_other_settings_are_refused(
    config: CorpusConfig, jsonl: Path
) -> None:
    first = prepare(config, progress=False)
    times = {path: path.stat().st_mtime_ns for path in Path(config.dir).rglob("*")}
    assert prepare(config, progress=False) == first
    assert {path: path.stat().st_mtime_ns for path in Path(config.dir).rglob("*")} == times
    with pytest.raises(ConfigError, match="val_fraction"):
        prepare(replace(config, val_fraction=0.2), progress=False)
    assert Manifest.load(config.dir) == first
    (Path(config.dir) / "manifest.json").unlink()
    with pytest.raises(ConfigError, match="no prepared corpus"):
        prepare(config, progress=False)
    assert first.licence == "CC0-1.0" and first.duplicates == 0
    assert first.to_dict()["settings"]["source"] == f"files:{jsonl}"


def test_prepare_large_vocabulary_has_32_bits(config: CorpusConfig, tmp_path: Path) -> None:
    vocab = {f"w{number}": number for number in range(70_000)} | {"<|endoftext|>": 70_000}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="w0"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()  # type: ignore[assignment]
    library.save(str(tmp_path / "big.json"))
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number}.txt").write_text(f"w{number} w69999 w65536 " * 5)
    spec = str(tmp_path / "big.json")
    large = replace(config, source=f"files:{texts}", tokenizer=spec, val_fraction=0.2)
    result = prepare(large, progress=False)
    assert (result.dtype, result.vocab_size, result.eot) == ("uint32", 70_001, 70_000)
    ids = _ids(Path(config.dir), "train")
    assert ids[:16] == [ids[0], 69_999, 65_536] * 5 + [70_000]
    check_corpus(result, config.dir, vocab_size=70_001, seq_len=8, tokenizer=spec)


def test_prepare_single_document_holds_out_its_end(
    config: CorpusConfig, tmp_path: Path, texts: list[str]
) -> None:
    """Unseen by the tokenizer as well."""
    text = "".join(text.replace("\n", " ") + "\n" for text in texts)
    for name in ("one.txt", "same.txt"):
        (tmp_path / name).write_text(text)
    lone = replace(config, source=f"files:{tmp_path}/one.txt,{tmp_path}/same.txt")
    made = prepare(lone, progress=False)
    assert (made.train.documents, made.val.documents, made.duplicates) == (1, 1, 1)
    assert made.train.bytes + made.val.bytes == len(text.encode())
    start = Tokenizer.load(config.dir).decode(_ids(Path(config.dir), "train")[:-1])
    assert start.endswith("\n") and 0.89 < len(start) / len(text) <= 0.9
    assert made.tokenizer_sha256 == Tokenizer.train([start], 300).sha256
    check_corpus(made, config.dir, vocab_size=300, seq_len=64)


@pytest.mark.parametrize(("text", "max_bytes"), [("", None), ("a single document", 3), ("x", None)])
def test_prepare_too_little_text_is_refused_and_leaves_nothing(
    config: CorpusConfig, tmp_path: Path, text: str, max_bytes: int | None
) -> None:
    path = tmp_path / "one.txt"
    path.write_text(text)
    one = replace(config, source=f"files:{path}", tokenizer="bpe:257", max_bytes=max_bytes)
    with pytest.raises(ConfigError, match="source=files:.*one.txt"):
        prepare(one, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["one.txt"]


@pytest.mark.parametrize("folder", ["/proc/x", "s3://bucket/corpus"])
def test_prepare_unwritable_folder_is_refused_at_once(folder: str, config: CorpusConfig) -> None:
    with pytest.raises(ConfigError, match=f"dir.*{folder}"):
        prepare(replace(config, dir=folder), progress=False)


def test_prepare_locked_folder_waits_with_a_message(
    config: CorpusConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(atomic, "_SILENT_WAIT_S", 0.01)
    caplog.set_level("INFO")
    with ThreadPoolExecutor(1) as pool, FileLock(tmp_path / ".corpus.lock"):
        made = pool.submit(prepare, config, progress=False)
        while not caplog.messages and not made.done():
            time.sleep(0.02)
        assert not made.done() and not Path(config.dir).exists()
    assert Manifest.load(config.dir) == made.result()
    assert f"prepare of {config.dir}" in caplog.text


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_text(f"note {number}\n" * 40)
    return folder


@pytest.fixture
def own(tmp_path: Path, notes: Path) -> CorpusConfig:
    return CorpusConfig(dir=str(tmp_path / "corpus"), source=f"files:{notes}", tokenizer="bpe:257")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda n: (n / "0.txt").write_text("note 0\n" * 41), "0.txt"),
        # of the same size
        (lambda n: (n / "1.txt").write_text("nota 1\n" * 40), "1.txt"),
        (lambda n: (n / "2.txt").rename(n / "4.txt"), "2.txt"),
    ],
)
def test_prepare_changed_text_is_refused_and_training_names_it(
    change: Callable[[Path], object], name: str, notes: Path, own: CorpusConfig,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    made = prepare(own, progress=False)
    assert prepare(own, progress=False) == made
    change(notes)
    before = {path: path.stat().st_mtime_ns for path in Path(own.dir).rglob("*")}
    with pytest.raises(ConfigError, match=f"dir={own.dir} .*{name}"):
        prepare(own, progress=False)
    assert {path: path.stat().st_mtime_ns for path in Path(own.dir).rglob("*")} == before
    capsys.readouterr()
    DataConfig(CorpusConfig(dir=own.dir, tokenizer="bpe:257"), seq_len=4, global_batch=1).check(257)
    assert name in capsys.readouterr().err


def test_prepare_equal_text_is_no_change(notes: Path, own: CorpusConfig, told: Told) -> None:
    """A copy or a touch; text that was moved away altogether."""
    made = prepare(own, progress=False)
    os.utime(notes / "0.txt", (1, 1))
    args = [f"--data.corpus.{key}={getattr(own, key)}" for key in ("dir", "source", "tokenizer")]
    assert "already prepared" in told("prepare", *args)
    shutil.rmtree(notes)
    assert prepare(own, progress=False) == made


def test_training_with_other_settings_of_the_corpus_is_refused(config: CorpusConfig) -> None:
    prepare(config, progress=False)
    unset = CorpusConfig(config.dir, tokenizer=config.tokenizer)  # the others are as prepared
    DataConfig(unset, 8, 4).check(4096)
    DataConfig(config, 8, 4).check(4096)
    for key, value in {"source": "files:other.txt", "val_fraction": 0.7}.items():
        with pytest.raises(ConfigError, match=f"^data.corpus.{key} is {value}"):
            DataConfig(replace(config, **{key: value}), 8, 4).check(4096)  # type: ignore[arg-type]
