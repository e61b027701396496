"""A small corpus, made once for all tests that only read it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from lightning_sv.corpus import CorpusConfig, Manifest, prepare


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """300 different documents of random words, some with characters beyond ASCII."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(1, 6))) for _ in range(200)]
    words += ["naïve", "日本", "🙂", "\n"]
    drawn = [" ".join(rng.choices(words, k=rng.randint(5, 120))) for _ in range(300)]
    return [f"{number}: {text}" for number, text in enumerate(drawn)]


@pytest.fixture(scope="session")
def jsonl(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    path = tmp_path_factory.mktemp("text") / "documents.jsonl"
    write_rows(path, texts)
    return path


def write_rows(path: Path, texts: Iterable[str]) -> None:
    """Write a text per line, in the format of JSON lines."""
    lines = [json.dumps({"text": text, "id": 1}) + "\n" for text in texts]
    path.write_text("".join(lines))


def _config(folder: Path, jsonl: Path) -> CorpusConfig:
    return CorpusConfig(
        dir=str(folder),
        source=f"files:{jsonl}",
        tokenizer="bpe:300",
        val_fraction=0.1,
        chunk_bytes="16KB",
        licence="CC0-1.0",
    )


@pytest.fixture
def config(tmp_path: Path, jsonl: Path) -> CorpusConfig:
    return _config(tmp_path / "corpus", jsonl)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory, jsonl: Path) -> Path:
    """The folder of a prepared corpus; do not alter it."""
    folder = tmp_path_factory.mktemp("prepared") / "corpus"
    prepare(_config(folder, jsonl), progress=False)
    return folder


@pytest.fixture(scope="session")
def manifest(corpus: Path) -> Manifest:
    return Manifest.load(corpus)


def shard_ids(corpus: Path, split: str) -> list[np.ndarray]:
    """Return the ids of each shard of a split, read by the description of litdata's format."""
    folder = corpus / split
    dtype = Manifest.load(corpus).dtype
    shards = []
    for chunk in json.loads((folder / "index.json").read_text())["chunks"]:
        header = 4 * (chunk["chunk_size"] + 2)  # number of documents, offsets
        shards.append(np.fromfile(folder / chunk["filename"], dtype=dtype, offset=header))
    return shards
