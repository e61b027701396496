"""Every way in which a corpus can be damaged or unfit is found, and named."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_sv.__main__ import main
from lightning_sv.atomic import file_sha256
from lightning_sv.corpus import CorpusConfig, Manifest, check_corpus, open_split, prepare, validate
from lightning_sv.corpus.manifest import CHECKSUM, checksum
from lightning_sv.corpus.validate import STAMP
from lightning_sv.errors import ConfigError
from tests.conftest import Refused, thinned, write_run_args
from tests.lit.runs import contents


def _load_and_check(root: Path) -> None:
    check_corpus(Manifest.load(root), root)


def _flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def test_check_corpus_good_copy_passes(copy: Path) -> None:
    manifest = Manifest.load(copy)
    check_corpus(manifest, copy, vocab_size=300, seq_len=64, tokenizer="bpe:300", checksums=True)
    check_corpus(manifest, copy, vocab_size=320, tokenizer=str(copy / "tokenizer.json"))
    _flip(copy / "val/chunk-0-0.bin")
    check_corpus(manifest, copy, checksums=False)


def _in_manifest(
    edit: Callable[[dict[str, Any]], object], *, signed: bool = True
) -> Callable[[Path], None]:
    """Return a damage of manifest.json, by default with a checksum of the new content."""

    def damage(root: Path) -> None:
        path = root / "manifest.json"
        data = json.loads(path.read_text())
        edit(data)
        if signed and CHECKSUM in data:
            data[CHECKSUM] = checksum(data)
        path.write_text(json.dumps(data))

    return damage


def _foreign_shard(root: Path) -> None:
    index = json.loads((root / "train/index.json").read_text())
    index["chunks"][0]["filename"] = "../../x.bin"
    (root / "train/index.json").write_text(json.dumps(index))


Damage = Callable[[Path], object]


def _without(key: str) -> Damage:
    return _in_manifest(lambda content: content.pop(key))


def _with(**values: object) -> Damage:
    return _in_manifest(lambda content: content.update(values))


def _edited(content: dict[str, Any]) -> None:
    content["splits"]["val"]["shards"][0]["sha256"] = "0"


#: name -> damage, and the file or key that the error names
DAMAGES: dict[str, tuple[Damage, str]] = {
    "no index": (lambda c: (c / "train/index.json").unlink(), "train/index.json"),
    "bad index": (lambda c: (c / "val/index.json").write_text("{"), "val/index.json"),
    "foreign shard": (_foreign_shard, "train/index.json"),
    "no shard": (lambda c: (c / "train/chunk-0-1.bin").unlink(), "chunk-0-1.bin"),
    "short shard": (lambda c: os.truncate(c / "train/chunk-0-0.bin", 9), "chunk-0-0.bin"),
    "no tokenizer": (lambda c: (c / "tokenizer.json").unlink(), "tokenizer.json"),
    "other tokenizer": (lambda c: _flip(c / "tokenizer.json"), "tokenizer.json"),
    "no manifest": (lambda c: (c / "manifest.json").unlink(), "manifest.json"),
    "no JSON": (lambda c: (c / "manifest.json").write_text("{"), "manifest.json"),
    "version": (_with(version=99), "version is 99"),
    "incomplete": (_without("eot"), "'eot'"),
    "no checksum": (_without(CHECKSUM), CHECKSUM),
    "edited": (_in_manifest(_edited, signed=False), CHECKSUM),
    "outside": (_with(tokenizer_file="../tokenizer.json"), "../tokenizer.json"),
    "token": (_with(vocab_size=100), "outside the vocabulary"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_check_corpus_damage_is_named(
    copy: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(copy)
    with pytest.raises(ConfigError, match=re.escape(message)):
        _load_and_check(copy)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_size", 256),
        ("seq_len", 9_000),
        ("tokenizer", "gpt2"),
        ("tokenizer", "absent.json"),
    ],
)
def test_check_corpus_unfit_model_is_refused(corpus: Path, key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{key} is {value}"):
        check_corpus(Manifest.load(corpus), corpus, **{key: value})


@pytest.mark.parametrize(("split", "key"), [("val", "seq_len"), ("test", "split")])
def test_open_split_unfit_request_is_refused(corpus: Path, split: Any, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        open_split(corpus, split, seq_len=9_000)


@pytest.mark.parametrize("resumed", thinned([True, False], [False]))
def test_fit_damaged_shard_writes_nothing(
    resumed: bool, tmp_path: Path, copy: Path, refused: Refused
) -> None:
    args = write_run_args(copy, tmp_path)
    run = tmp_path / "run"
    fit = ["fit", *args, "--run_dir", str(run), "--trainer.max_steps"]
    shard = copy / "train/chunk-0-0.bin"
    if resumed:
        assert main([*fit, "1"]) == 0
        fit = [*fit[:-1], "--ckpt_path", "last", "--trainer.max_steps"]
    _flip(shard)
    before = contents(run)
    assert shard.name in refused(*fit, "2")
    assert contents(run) == before


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the shards that are hashed from now on."""
    names = list[str]()

    def record(path: Path) -> str:
        names.extend([path.name] if path.suffix == ".bin" else [])
        return file_sha256(path)

    monkeypatch.setattr(validate, "file_sha256", record)
    return names


def _shards(root: Path) -> int:
    return len(list(root.rglob("*.bin")))


def test_check_corpus_after_prepare_hashes_no_shard(
    config: CorpusConfig, hashed: list[str]
) -> None:
    prepare(config, progress=False)
    hashed.clear()
    _load_and_check(Path(config.dir))
    assert not hashed


def _copied(root: Path) -> None:
    """Replace a folder by its copy, with the times and the stamp of the original."""
    root.rename(root.with_name("original"))
    shutil.copytree(root.with_name("original"), root)


OUTDATED: dict[str, Callable[[Path], object]] = {
    "copied": _copied,
    "new manifest": _in_manifest(lambda d: d.update(licence="MIT")),
    "no stamp": lambda c: (c / STAMP).unlink(),
    "damaged stamp": lambda c: (c / STAMP).write_text("{"),
    "a pipe": lambda c: ((c / STAMP).unlink(), os.mkfifo(c / STAMP)),
}


@pytest.mark.parametrize("change", OUTDATED.values(), ids=OUTDATED)
def test_outdated_stamp_hashes_once_more(
    copy: Path, hashed: list[str], change: Callable[[Path], object]
) -> None:
    _load_and_check(copy)
    hashed.clear()
    change(copy)
    for _ in range(2):  # the second check finds the stamp of the first
        _load_and_check(copy)
        assert len(hashed) == _shards(copy) > 1
    assert not list(copy.glob(".*"))


def test_check_corpus_damage_of_equal_size_and_time_is_found(copy: Path) -> None:
    _load_and_check(copy)
    shard = copy / "train/chunk-0-0.bin"
    before = shard.stat()
    _flip(shard)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    for _ in range(2):  # the refusal leaves no stamp
        with pytest.raises(ConfigError, match=r"chunk-0-0\.bin .*sha256"):
            _load_and_check(copy)


def test_check_corpus_read_only_folder_is_hashed_each_time(copy: Path, hashed: list[str]) -> None:
    """A name that a folder takes stands for missing permissions, which root would not miss."""
    (copy / STAMP).unlink(missing_ok=True)
    (copy / STAMP / "taken").mkdir(parents=True)
    for number in (1, 2):
        _load_and_check(copy)
        assert len(hashed) == number * _shards(copy)
    _flip(copy / "train/chunk-0-0.bin")
    with pytest.raises(ConfigError, match=r"chunk-0-0\.bin .*sha256"):
        _load_and_check(copy)
