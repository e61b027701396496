"""Files with code in them, and pipes: none is run or waited for, each is refused with one sentence
and exit code 2."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from lightning_sv import Backbone, BackboneConfig
from lightning_sv.corpus import Manifest, Tokenizer, check_corpus, open_split
from lightning_sv.corpus.manifest import CHECKSUM, checksum
from lightning_sv.runs.checkpoint import CHECKPOINT_KEY, FORMAT, load_backbone
from lightning_sv.runs.directory import CONFIG, LAST, SUMMARY
from lightning_sv.scale import ScaleOptions
from tests.conftest import Refused, argv, edit_json, thinned
from tests.lit.runs import commands_that_read, flip
from tests.runs.test_events import finish, write


class Payload:
    """Creates a file when unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, int]]:
        return os.open, (str(self.marker), os.O_CREAT | os.O_WRONLY)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """Return the file that a payload would create, after checking that it would."""
    path = tmp_path / "marker"
    os.close(pickle.loads(pickle.dumps(Payload(path))))
    assert path.exists()
    path.unlink()
    return path


@pytest.fixture
def module(tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module whose import creates the marker."""
    code = f"open({str(marker)!r}, 'w').close()\nfrom lightning_sv.scale.vector import DirectScale"
    (tmp_path / "payload_module.py").write_text(f"{code} as MyScale\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "payload_module", raising=False)
    return "payload_module"


def write_run(folder: Path, corpus: Path, scale: str = "unified", **more: object) -> Path:
    """Write a run directory as `generate` reads it."""
    config = BackboneConfig(d_model=16, n_layer=1, n_head=2, vocab_size=300)
    weights = Backbone(config, "unified").state_dict()
    made = {
        "format": FORMAT,
        "backbone": asdict(config),
        "scale": scale,
        "scale_options": asdict(ScaleOptions()),
        "tokenizer_sha256": Tokenizer.load(corpus).sha256,
        "data": {"seq_len": 8},
        "corpus_hash": "c0ffee",
    }
    checkpoint = {
        CHECKPOINT_KEY: made,
        "state_dict": {f"backbone.{name}": value for name, value in weights.items()},
    }
    (folder / LAST).parent.mkdir(parents=True)
    torch.save(checkpoint | more, folder / LAST)
    (folder / CONFIG).write_text("data: {seq_len: 8}\nmodel: {scale: unified}\n")
    shutil.copy(corpus / "tokenizer.json", folder)
    write(folder, [(10, 1.0)], number=1)
    return folder


@pytest.mark.parametrize("damage", ["a pickled call", "a flipped bit"])
def test_checkpoint_that_is_unreadable_is_refused(
    damage: str, corpus: Path, run_args: list[str], tmp_path: Path, marker: Path, refused: Refused
) -> None:
    if damage == "a pickled call":
        run = write_run(tmp_path / "run", corpus, payload=Payload(marker))
    else:
        run = write_run(tmp_path / "run", corpus)
        flip(run / LAST)
    new = tmp_path / "new"
    for words in commands_that_read(run, run_args, new):
        assert f"{run / LAST} is not a readable checkpoint" in refused(*words)
    assert not new.exists() and not marker.exists()


def test_checkpoint_whose_strategy_names_a_module_is_refused(
    corpus: Path, tmp_path: Path, marker: Path, module: str, refused: Refused
) -> None:
    run = write_run(tmp_path / "run", corpus, scale=f"hg+dnp+iwd+{module}:MyScale")
    for trusted in ([], ["--trust_module", "another"]):
        assert f"--trust_module {module}" in refused("generate", str(run), *trusted)
    assert not marker.exists()
    with pytest.raises(ValueError, match="weights"):  # OR's weights under a direct scale
        load_backbone(run, allow=[module])
    assert marker.exists()


def test_run_with_a_foreign_tokenizer_is_refused(
    corpus: Path, tmp_path: Path, refused: Refused
) -> None:
    run = write_run(tmp_path / "run", corpus)
    tokenizer = run / "tokenizer.json"
    tokenizer.write_bytes(tokenizer.read_bytes() + b"\n")
    assert f"{run}: tokenizer_sha256 is" in refused("generate", str(run))


HOSTILE = {
    "python tag": "model: !!python/object/apply:os.open [MARKER, 65]\n",
    "cycle": "a: &a {b: *a}\n",
    "deep": "a: " + "[" * 1_000,
}


@pytest.mark.parametrize("kind", thinned(HOSTILE, ["python tag", "cycle"]))
def test_hostile_config_is_refused(
    kind: str, corpus: Path, tmp_path: Path, marker: Path, refused: Refused
) -> None:
    run = write_run(tmp_path / "run", corpus)
    (run / CONFIG).write_text(HOSTILE[kind].replace("MARKER", str(marker)))
    assert "is not valid YAML" in refused("generate", str(run))
    for command in ("fit", "validate", "params", "prepare"):
        assert "is not valid YAML" in refused(command, "--config", str(run / CONFIG))
    assert not marker.exists()


def test_config_of_a_run_reads_no_environment(
    corpus: Path, tmp_path: Path, refused: Refused
) -> None:
    run = write_run(tmp_path / "run", corpus)
    (run / CONFIG).write_text("data: {seq_len: '${oc.env:HOME}'}\n")
    assert "'${oc.env:HOME}'" in refused("generate", str(run))


@pytest.mark.parametrize(
    ("key", "value"),
    [("data_format", ["pickle"]), ("item_loader", "PyTreeLoader"), ("compression", "zstd")],
)
def test_index_with_a_pickle_format_is_refused(
    key: str, value: object, copy: Path, marker: Path
) -> None:
    index = copy / "train/index.json"
    (copy / "train/chunk-0-0.bin").write_bytes(pickle.dumps(Payload(marker)))
    edit_json(index, config=json.loads(index.read_text())["config"] | {key: value})
    with pytest.raises(ValueError, match="train/index.json"):
        open_split(copy, "train", seq_len=8)
    assert not marker.exists()


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../x", "a/../../x", "..\\x", "C:x", "\\\\host\\x", "a\0b", "\ud800"]
)
def test_manifest_with_a_file_outside_is_refused(copy: Path, name: str) -> None:
    path = copy / "manifest.json"
    manifest = json.loads(path.read_text()) | {"tokenizer_file": name}
    path.write_text(json.dumps(manifest | {CHECKSUM: checksum(manifest)}))
    with pytest.raises(ValueError, match="outside"):
        Manifest.load(copy)


@pytest.mark.parametrize("name", ["tokenizer.json", "val/index.json", "val/chunk-0-0.bin"])
def test_link_out_of_the_corpus_is_refused(copy: Path, tmp_path: Path, name: str) -> None:
    (copy / name).rename(tmp_path / "elsewhere")
    (copy / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="is a link out of"):
        check_corpus(Manifest.load(copy), copy)
    (tmp_path / "linked").symlink_to(copy)  # a link to the whole folder is fine
    (copy / name).unlink()
    (tmp_path / "elsewhere").rename(copy / name)
    check_corpus(Manifest.load(tmp_path / "linked"), tmp_path / "linked")


@pytest.mark.timeout(120)  # nothing waits for a pipe's other end
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("events.out.tfevents.1", "report RUN"),
        ("summary.json", "report RUN"),
        ("checkpoints/last.ckpt", "generate RUN --prompt x"),
        ("checkpoints/last.ckpt", "inspect RUN"),
        ("checkpoints/last.ckpt", "fit --run_dir RUN --ckpt_path last"),
        ("config.json", "inspect RUN"),
    ],
)
def test_command_pipe_in_a_directory_is_refused(
    name: str, words: str, short_args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    refused: Refused,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    (run / LAST).parent.mkdir(parents=True)
    is_of_a_run = "tfevents" in name or name in (SUMMARY, str(LAST))
    if is_of_a_run:
        write(run, [(10, 4.0)], number=1)
        finish(run)
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    before = sorted(run.rglob("*"))
    command, *rest = argv(words.replace("RUN", str(run)))
    settings = short_args if command == "fit" else []
    error = refused(command, *settings, *rest)
    assert Path(name).name in error
    assert sorted(run.rglob("*")) == before and not (tmp_path / "runs").exists()
