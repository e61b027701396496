"""Shards that were deleted, cut or altered: named before the first step, and nothing is written."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from lightning_sv.__main__ import main
from lightning_sv.corpus import CorpusConfig, Manifest, prepare
from tests.conftest import write_run_args
from tests.faults.conftest import Tally

pytestmark = pytest.mark.faults
TRIES = 10


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """The corpus of the other tests in more shards."""
    root = tmp_path_factory.mktemp("many")
    source = Manifest.load(corpus).source
    config = CorpusConfig(dir=str(root / "shards"), source=source, tokenizer="bpe:300", val_fraction=0.2,
                          max_bytes=400_000, chunk_bytes=40_000)  # fmt: skip
    prepare(config, progress=False)
    assert len(list((root / "shards").glob("*/*.bin"))) > 4
    return root / "shards"


def damage(path: Path, how: str, draw: random.Random) -> None:
    raw = bytearray(path.read_bytes())
    match how:
        case "deleted":
            path.unlink()
            return
        case "truncated":
            del raw[draw.randrange(len(raw)) :]
        case "bit-flipped":
            raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
    path.write_bytes(raw)


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("how", ["deleted", "truncated", "bit-flipped"])
def test_damaged_shard_is_refused_before_the_first_step(
    how: str, large: bool, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], tally: Tally,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if large:  # for this corpus: its hashing is long enough to be shown
        monkeypatch.setattr("lightning_sv.corpus.validate.SHOWN_BYTES", 1)
    args = write_run_args(shards, tmp_path)
    assert main(["fit", *args, "--trainer.max_steps", "1", "--run_dir", str(tmp_path / "good")]) == 0
    assert ("checking shards" in capsys.readouterr().err) == large
    draw = random.Random(how)
    files = sorted(shards.glob("*/*.bin"))
    for n in range(TRIES):
        path, run = draw.choice(files), tmp_path / f"run{n}"
        good = path.read_bytes()
        damage(path, how, draw)
        try:
            code = main(["fit", *args, "--run_dir", str(run)])
        finally:
            path.write_bytes(good)
        out, err = capsys.readouterr()
        errors = [line for line in err.splitlines() if line.startswith("error: ")]
        name = f"{path.parent.name}/{path.name}"
        fine = code == 2 and len(errors) == 1 and name in errors[0] and "step 1" not in out and not run.exists()
        tally(f"a shard {how}", fine)
        assert fine, (name, code, err)


def test_damaged_shard_is_refused_by_a_resumed_run(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], tally: Tally
) -> None:
    copy = Path(shutil.copytree(shards, tmp_path / "copy"))
    args = write_run_args(copy, tmp_path)
    fit = ["fit", *args, "--run_dir", str(tmp_path / "run"), "--trainer.max_steps"]
    assert main([*fit, "2"]) == 0
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    path = sorted(copy.glob("train/*.bin"))[0]
    damage(path, "bit-flipped", random.Random(0))
    capsys.readouterr()
    code = main([*fit, "4", "--extend", "--ckpt_path", "last"])
    after = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    fine = code == 2 and path.name in capsys.readouterr().err and after == before
    tally("a shard bit-flipped before a resume", fine)
    assert fine
