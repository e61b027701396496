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


#: name -> damage, message
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no index": (lambda c: (c / "train/index.json").unlink(), r"train/index\.json is missing"),
    "bad index": (lambda c: (c / "val/index.json").write_text("{"), r"val/index\.json is damaged"),
    "no shard": (lambda c: (c / "train/chunk-0-1.bin").unlink(), r"chunk-0-1\.bin is missing"),
    "short shard": (lambda c: os.truncate(c / "train/chunk-0-0.bin", 9), r"chunk-0-0\.bin has 9 bytes; expected \d"),
    "foreign shard": (_foreign_shard, r"train/index\.json .*manifest\.json"),
    "no tokenizer": (lambda c: (c / "tokenizer.json").unlink(), r"tokenizer\.json is missing"),
    "other tokenizer": (lambda c: _flip(c / "tokenizer.json"), r"is not the tokenizer that made the shards"),
    "no manifest": (lambda c: (c / "manifest.json").unlink(), r"manifest\.json does not exist"),
    "no JSON": (lambda c: (c / "manifest.json").write_text("{"), r"manifest\.json cannot be read as JSON"),
    "version": (_in_manifest(lambda d: d.update(version=99)), r"version is 99; expected 1"),
    "incomplete": (_in_manifest(lambda d: d.pop("eot")), r"is incomplete \(KeyError\('eot'\)\)"),
    "no checksum": (_in_manifest(lambda d: d.pop(CHECKSUM)), CHECKSUM),
    "edited": (_in_manifest(lambda d: d["splits"]["val"]["shards"][0].update(sha256="0"), signed=False), CHECKSUM),
    "no number": (_in_manifest(lambda d: d.update(vocab_size="9")), r"vocab_size is '9'"),
    "total": (_in_manifest(lambda d: d["splits"]["train"].update(tokens=1)), r"shards of train do not add up"),
    "token": (_in_manifest(lambda d: d["splits"]["val"].update(largest_token=300)), r"token 300 of val .* is outside"),
    **{f"no {key}": (_in_manifest(lambda d, key=key: d["splits"]["val"].update({key: 0})), r"manifest\.json")
       for key in ("bytes", "tokens", "documents")},
}  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_check_corpus_damage_is_named(
    copy: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(copy)
    with pytest.raises(ConfigError, match=message):
        _load_and_check(copy)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"vocab_size": 256}, r"vocab_size is 256; expected at least 300"),
        ({"seq_len": 9_000}, r"seq_len is 9000"),
        ({"tokenizer": "gpt2"}, r"tokenizer is gpt2; expected bpe:300"),
        ({"tokenizer": "absent.json"}, r"tokenizer is .*absent\.json"),
    ],
)
def test_check_corpus_unfit_model_is_refused(
    corpus: Path, wanted: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_corpus(Manifest.load(corpus), corpus, **wanted)


@pytest.mark.parametrize(
    ("split", "message"), [("val", "seq_len is 9000"), ("test", "split 'test' is unknown")]
)
def test_open_split_unfit_request_is_refused(corpus: Path, split: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_split(corpus, split, seq_len=9_000)


@pytest.mark.parametrize("resumed", thinned([True, False], [False]))
def test_fit_damaged_shard_writes_nothing(
    resumed: bool, tmp_path: Path, copy: Path, refused: Refused
) -> None:
    args, run = write_run_args(copy, tmp_path), tmp_path / "run"
    fit = ["fit", *args, "--run_dir", str(run), "--trainer.max_steps"]
    shard = copy / "train/chunk-0-0.bin"
    if resumed:
        assert main([*fit, "1"]) == 0
        fit = [*fit[:-1], "--allow_lr_jump", "--ckpt_path", "last", "--trainer.max_steps"]
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
    "nested stamp": lambda c: (c / STAMP).write_text("[" * 100_000),
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


def test_check_corpus_continues_where_it_was_stopped(
    copy: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validate, "_STAMP_S", 0)
    monkeypatch.setattr(
        validate, "in_threads", lambda name, check, shards, *_, **__: list(map(check, shards))
    )
    _load_and_check(copy)
    for shard in (copy / f"train/chunk-0-{number}.bin" for number in range(2)):
        shard.touch()
    damaged = copy / "train/chunk-0-1.bin"
    _flip(damaged)
    hashed.clear()
    for found in (["chunk-0-0.bin", damaged.name], [damaged.name]):
        with pytest.raises(ConfigError, match=damaged.name):
            _load_and_check(copy)
        assert hashed == found
        hashed.clear()


def test_check_corpus_damage_of_equal_size_and_time_is_found(copy: Path) -> None:
    _load_and_check(copy)
    shard = copy / "train/chunk-0-0.bin"
    before = shard.stat()
    _flip(shard)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    for _ in range(2):  # the refusal leaves no stamp
        with pytest.raises(ConfigError, match=r"chunk-0-0\.bin .*sha256"):
            _load_and_check(copy)


def test_check_corpus_two_at_once_one_hashes(
    copy: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads simulate two nodes that share a disk; the file lock excludes one while the other
    hashes."""
    both = Barrier(2)

    def wait(*args: Any, **settings: Any) -> AbstractContextManager[None]:
        both.wait(10)  # neither has found a stamp
        return locked(*args, **settings)

    monkeypatch.setattr(validate, "locked", wait)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(_load_and_check, [copy, copy]))
    assert len(hashed) == _shards(copy)


def test_check_corpus_read_only_folder_is_hashed_each_time(copy: Path, hashed: list[str]) -> None:
    """Names that folders take stand for missing permissions, which root would not miss."""
    for name in (STAMP, f".{STAMP}.lock"):
        (copy / name).unlink(missing_ok=True)
        (copy / name / "taken").mkdir(parents=True)
    for number in (1, 2):
        _load_and_check(copy)
        assert len(hashed) == number * _shards(copy)
    _flip(copy / "train/chunk-0-0.bin")
    with pytest.raises(ConfigError, match=r"chunk-0-0\.bin .*sha256"):
        _load_and_check(copy)
