"""Datasets of a hub on the loopback address, in parts: lost connections, failures, a changed
revision, no network.

The client reads HF_ENDPOINT when it is imported, so each preparation is a process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from lightning_sv.corpus import CorpusConfig, Manifest, prepare
from tests.corpus.conftest import write_rows
from tests.corpus.hub import NAME, Hub

CARD = """---
configs:
- config_name: default
  data_files:
  - {split: train, path: data/*/*}
- config_name: sample-10BT
  data_files:
  - {split: train, path: sample/10BT/*}
---
"""
SCRIPT = """
import sys
from huggingface_hub.utils import _http
from lightning_sv.corpus import CorpusConfig, prepare
from lightning_sv.errors import ConfigError
_http.time.sleep = lambda seconds: None  # of the client's back-off
dir, name, subset, limit, tokenizer = sys.argv[1:]
config = CorpusConfig(dir, f"hf:{name}", tokenizer, val_fraction=0.1, hf_subset=subset, max_tokens=int(limit) or None)
try:
    prepare(config, progress=False, workers=1, part_bytes=4000)
except ConfigError as error:
    sys.exit(str(error))
"""


@pytest.fixture
def hub(tmp_path: Path, texts: list[str]) -> Iterator[Hub]:
    """A dataset with the layout of FineWeb-Edu: a card, subsets, several Parquet files with row
    groups."""
    folder = tmp_path / "hub"
    for number in range(3):
        rows = texts[number * 100 : (number + 1) * 100]
        table = pyarrow.table({"text": rows, "id": rows, "url": ["x" * 500] * 100})
        for name in (
            f"sample/10BT/00{number}_00000.parquet",
            f"data/CC-MAIN-2013-20/train-0000{number}.parquet",
        ):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            pyarrow.parquet.write_table(table, path, row_group_size=10)
    (folder / "README.md").write_text(CARD)
    server = Hub(folder)
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def expected(tmp_path: Path, texts: list[str]) -> str:
    """The hash of the corpus of the same documents in a file."""
    path = tmp_path / "texts.jsonl"
    write_rows(path, texts)
    config = CorpusConfig(str(tmp_path / "expected"), f"files:{path}", "bpe:300", val_fraction=0.1)
    return prepare(config, progress=False).corpus_hash


def run(
    hub: Hub,
    target: Path,
    name: str = NAME,
    subset: str = "sample-10BT",
    limit: int = 0,
    tokenizer: str = "bpe:300",
) -> str:
    """Prepare a dataset of the hub; return the error, empty if there is none."""
    command = [sys.executable, "-c", SCRIPT, str(target), name, subset, str(limit), tokenizer]
    home = {"HF_HOME": str(target.parent / "hf"), "HF_ENDPOINT": hub.url, "NO_PROXY": "127.0.0.1"}
    quiet = {
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
    }
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment | home | quiet, timeout=300
    )
    assert "Traceback" not in done.stderr
    return done.stderr if done.returncode else ""


def is_data(path: str) -> bool:
    """Return True for a request of a Parquet file's content."""
    return path.endswith(".parquet") and "/resolve/" in path


@pytest.mark.slow
def test_prepare_of_a_hub_in_parts(hub: Hub, tmp_path: Path, expected: str) -> None:
    """Failures that pass are repeated; then a lost connection, a changed revision, and no network
    at the end."""
    answers = iter([0] * 4 + [503] * 3)
    hub.fail = lambda path: next(answers, 0) if is_data(path) else 0
    assert run(hub, tmp_path / "whole") == ""
    whole = Manifest.load(tmp_path / "whole")
    assert whole.corpus_hash == expected
    assert whole.packages == {f"hf:{NAME}": "a" * 40}
    assert not any("data/CC-MAIN" in path for path in hub.paths if is_data(path))

    folder = tmp_path / "lost.parts"
    tokenizer = str(tmp_path / "whole/tokenizer.json")
    hub.fail = lambda path: -1 if len(list(folder.glob("[0-9]*/part.json"))) > 1 else 0
    error = run(hub, tmp_path / "lost", tokenizer=tokenizer)
    assert f"hf:{NAME}" in error
    assert folder.is_dir() and not (tmp_path / "lost").exists()

    hub.fail = lambda path: 0
    hub.revision = "b" * 40
    hub.paths.clear()
    assert "max_tokens" in run(
        hub, tmp_path / "lost", limit=10**9, tokenizer=tokenizer
    )  # all parts, but no corpus
    assert all(f"/resolve/{'a' * 40}/" in path for path in hub.paths if is_data(path))
    hub.fail = lambda path: -1
    assert run(hub, tmp_path / "lost", tokenizer=tokenizer) == ""
    assert Manifest.load(tmp_path / "lost").corpus_hash == whole.corpus_hash


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "word"),
    [
        (401, "HF_TOKEN"),
        (403, "HF_TOKEN"),
        (404, "hf_subset"),
        (429, "limits"),
        (500, "next start"),
    ],
)
def test_prepare_of_a_hub_that_refuses_names_the_reason(
    hub: Hub, tmp_path: Path, status: int, word: str
) -> None:
    hub.fail = lambda path: status
    assert word in run(hub, tmp_path / "none")
    assert not list(tmp_path.glob("none*"))


@pytest.mark.slow
def test_prepare_of_a_hub_absent_names_are_refused(hub: Hub, tmp_path: Path) -> None:
    assert "hf_subset" in run(hub, tmp_path / "name", name="nobody/none")
    assert "sample-10BT" in run(hub, tmp_path / "subset", subset="sample-1BT")
