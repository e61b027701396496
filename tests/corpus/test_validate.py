"""Every way in which a corpus can be damaged or unfit is found, and named."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from lightning_sv.__main__ import main
from lightning_sv.atomic import file_sha256, locked
from lightning_sv.corpus import CorpusConfig, Manifest, check_corpus, open_split, prepare, validate
from lightning_sv.corpus.manifest import CHECKSUM, checksum
from lightning_sv.corpus.validate import STAMP
from lightning_sv.errors import ConfigError
from tests.conftest import Refused, thinned, write_run_args
from tests.lit.runs import contents


@pytest.fixture
def copy(corpus: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(corpus, tmp_path / "copy"))


def _edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = json.loads(path.read_text())
    change(data)
    if CHECKSUM in data:
        data[CHECKSUM] = checksum(data)
    path.write_text(json.dumps(data))


def test_a_good_corpus_passes_wherever_it_lies(copy: Path, manifest: Manifest) -> None:
    check_corpus(Manifest.load(copy), copy, vocab_size=300, seq_len=64, tokenizer="bpe:300", checksums=True)
    check_corpus(Manifest.load(copy), copy, vocab_size=320, tokenizer=str(copy / "tokenizer.json"))


def _flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


DAMAGES: list[tuple[str, Callable[[Path], object], str]] = [
    ("no index", lambda c: (c / "train/index.json").unlink(), r"train/index\.json is missing"),
    ("bad index", lambda c: (c / "val/index.json").write_text("{"), r"val/index\.json is damaged"),
    ("no shard", lambda c: (c / "train/chunk-0-1.bin").unlink(), r"chunk-0-1\.bin is missing"),
    (
        "short shard",
        lambda c: (c / "train/chunk-0-0.bin").write_bytes((c / "train/chunk-0-0.bin").read_bytes()[:-2]),
        r"chunk-0-0\.bin has [\d,]+ bytes; expected [\d,]+",
    ),
    ("altered shard", lambda c: _flip(c / "val/chunk-0-0.bin"), r"chunk-0-0\.bin .*sha256"),
    ("no tokenizer", lambda c: (c / "tokenizer.json").unlink(), r"tokenizer\.json is missing"),
    ("other tokenizer", lambda c: _flip(c / "tokenizer.json"), r"is not the tokenizer that made the shards"),
    (
        "foreign shard",
        lambda c: _edit(c / "train/index.json", lambda d: d["chunks"][0].update(filename="../../x.bin")),
        r"train/index\.json .*manifest\.json",
    ),
    (
        "wrong total",
        lambda c: _edit(c / "manifest.json", lambda d: d["splits"]["train"].update(tokens=1)),
        r"shards of train do not add up",
    ),
    (
        "token out of range",
        lambda c: _edit(c / "manifest.json", lambda d: d["splits"]["val"].update(largest_token=300)),
        r"token 300 of val .* is outside the vocabulary of 300",
    ),
]


@pytest.mark.parametrize(("damage", "message"), [d[1:] for d in DAMAGES], ids=[d[0] for d in DAMAGES])
def test_damage_is_found_and_named(copy: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(copy)
    with pytest.raises(ValueError, match=message):
        check_corpus(Manifest.load(copy), copy)


def test_checksums_can_be_left_out(copy: Path) -> None:
    _flip(copy / "val/chunk-0-0.bin")
    check_corpus(Manifest.load(copy), copy, checksums=False)


MANIFESTS: list[tuple[str, Callable[[Path], object], str]] = [
    ("missing", lambda p: p.unlink(), r"manifest\.json does not exist"),
    ("no JSON", lambda p: p.write_text("{"), r"manifest\.json: .*JSON"),
    ("a list", lambda p: p.write_text("[]"), r"version is None"),
    ("version", lambda p: _edit(p, lambda d: d.update(version=99)), r"version is 99; expected 1"),
    ("incomplete", lambda p: _edit(p, lambda d: d.pop("eot")), r"is incomplete \(KeyError\('eot'\)\)"),
    ("malformed", lambda p: _edit(p, lambda d: d.update(splits=[])), r"is incomplete"),
    ("no number", lambda p: _edit(p, lambda d: d.update(vocab_size="9")), r"vocab_size is '9'"),
    ("no checksum", lambda p: _edit(p, lambda d: d.pop(CHECKSUM)), CHECKSUM),
]


@pytest.mark.parametrize(("damage", "message"), [m[1:] for m in MANIFESTS], ids=[m[0] for m in MANIFESTS])
def test_bad_manifests_are_refused(copy: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(copy / "manifest.json")
    with pytest.raises(ValueError, match=message):
        Manifest.load(copy)


def test_a_model_that_does_not_fit_is_refused(corpus: Path, manifest: Manifest) -> None:
    for wanted, message in [
        ({"vocab_size": 256}, r"vocab_size is 256; expected at least 300"),
        ({"seq_len": 9_000}, r"seq_len is 9000"),
        ({"tokenizer": "gpt2"}, r"tokenizer is gpt2; expected bpe:300"),
        ({"tokenizer": "bpe:1024"}, r"tokenizer is bpe:1024"),
        ({"tokenizer": "absent.json"}, r"tokenizer is .*absent\.json"),
    ]:
        with pytest.raises(ValueError, match=message):
            check_corpus(manifest, corpus, **wanted)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seq_len is 9000"):
        open_split(corpus, "val", seq_len=9_000)
    with pytest.raises(ValueError, match="split 'test' is unknown"):
        open_split(corpus, "test", seq_len=8)  # type: ignore[arg-type]


EDITS: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    ("val bytes", lambda d: d["splits"]["val"].update(bytes=d["splits"]["val"]["bytes"] + 1)),
    ("eot", lambda d: d.update(eot=1)),
    ("licence", lambda d: d.update(licence="MIT")),
    ("hash of a shard", lambda d: d["splits"]["val"]["shards"][0].update(sha256="0" * 64)),
    ("sources", lambda d: d["sources"].popitem()),
]


@pytest.mark.parametrize("edit", [e[1] for e in EDITS], ids=[e[0] for e in EDITS])
def test_an_edit_of_anything_in_the_manifest_is_found(copy: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = copy / "manifest.json"
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=rf"manifest\.json.*{CHECKSUM}"):
        Manifest.load(copy)


@pytest.mark.parametrize("key", ["bytes", "tokens", "documents"])
def test_an_empty_split_is_refused(copy: Path, key: str) -> None:
    _edit(copy / "manifest.json", lambda d: d["splits"]["val"].update({key: 0}))
    with pytest.raises(ValueError, match=r"manifest\.json"):
        Manifest.load(copy)


@pytest.mark.parametrize("how", thinned(["deleted", "truncated", "bit-flipped"], ["truncated"]))
def test_fit_and_resume_refuse_a_damaged_shard_and_write_nothing(
    how: str, tmp_path: Path, copy: Path, refused: Refused
) -> None:
    args, run = write_run_args(copy, tmp_path), tmp_path / "run"
    fit = ["fit", *args, "--run_dir", str(run), "--trainer.max_steps"]
    shard = copy / "train/chunk-0-0.bin"
    good = shard.read_bytes()
    if how == "bit-flipped":
        assert main([*fit, "1"]) == 0
        fit = [*fit[:-1], "--allow_lr_jump", "--ckpt_path", "last", "--trainer.max_steps"]
        _flip(shard)
    elif how == "deleted":
        shard.unlink()
    else:
        shard.write_bytes(good[:-5])
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


def _check(root: Path) -> None:
    check_corpus(Manifest.load(root), root)


def _shards(root: Path) -> int:
    return len(list(root.rglob("*.bin")))


def test_a_second_check_hashes_no_shard(copy: Path, hashed: list[str]) -> None:
    """The first hashes, because a copy is not verified, even if it has the times and the stamp of a corpus."""
    assert (copy / STAMP).is_file()
    for _ in range(2):
        _check(copy)
        assert len(hashed) == _shards(copy) > 1
    assert not list(copy.glob(".*"))


def test_a_check_after_a_preparation_hashes_no_shard(config: CorpusConfig, hashed: list[str]) -> None:
    prepare(config, progress=False)
    hashed.clear()
    _check(Path(config.dir))
    assert not hashed


OUTDATED: dict[str, Callable[[Path], object]] = {
    "touched": lambda c: (c / "train/chunk-0-0.bin").touch(),
    "new manifest": lambda c: _edit(c / "manifest.json", lambda d: d.update(licence="MIT")),
    "no stamp": lambda c: (c / STAMP).unlink(),
    "damaged stamp": lambda c: (c / STAMP).write_text("{"),
    "nested stamp": lambda c: (c / STAMP).write_text("[" * 100_000),
    "a list": lambda c: (c / STAMP).write_text("[]"),
    "a pipe": lambda c: ((c / STAMP).unlink(), os.mkfifo(c / STAMP)),
}


@pytest.mark.parametrize("change", OUTDATED.values(), ids=OUTDATED)
def test_shards_are_hashed_again_without_a_current_stamp(
    copy: Path, hashed: list[str], change: Callable[[Path], object]
) -> None:
    _check(copy)
    hashed.clear()
    change(copy)
    _check(copy)
    assert len(hashed) == _shards(copy)
    _check(copy)
    assert len(hashed) == _shards(copy)


def test_damage_after_a_check_is_found_despite_equal_size_and_time(copy: Path) -> None:
    _check(copy)
    shard = copy / "train/chunk-0-0.bin"
    before = shard.stat()
    _flip(shard)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    for _ in range(2):  # the refusal leaves no stamp
        with pytest.raises(ConfigError, match=r"chunk-0-0\.bin .*sha256"):
            _check(copy)


def test_one_of_two_simultaneous_checks_hashes(copy: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads simulate two nodes that share a disk; the file lock excludes one while the other hashes."""
    both = Barrier(2)

    def wait(*args: Any, **settings: Any) -> AbstractContextManager[None]:
        both.wait(10)  # neither has found a stamp
        return locked(*args, **settings)

    monkeypatch.setattr(validate, "locked", wait)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(_check, [copy, copy]))
    assert len(hashed) == _shards(copy)


def test_a_folder_that_cannot_be_written_is_hashed_each_time(copy: Path, hashed: list[str]) -> None:
    """Names that folders take stand for missing permissions, which root would not miss."""
    for name in (STAMP, f".{STAMP}.lock"):
        (copy / name).unlink(missing_ok=True)
        (copy / name / "taken").mkdir(parents=True)
    for number in (1, 2):
        _check(copy)
        assert len(hashed) == number * _shards(copy)
    _flip(copy / "train/chunk-0-0.bin")
    with pytest.raises(ConfigError, match=r"chunk-0-0\.bin .*sha256"):
        _check(copy)
