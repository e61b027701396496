"""Datasets of a hub, in parts: subsets, refusals, and the revision."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from lightning_sv.corpus import CorpusConfig, prepare
from lightning_sv.errors import ConfigError
from tests.corpus.conftest import write_rows

NAME = "hf:nobody/texts"
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


@pytest.fixture
def dataset(tmp_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset with the layout of FineWeb-Edu: a card, subsets, several Parquet files with row
    groups; the hub's client finds it by any name."""
    folder = tmp_path / "dataset"
    for subset, rows in (("sample/10BT", texts), ("data/CC-MAIN-2013-20", texts[:9])):
        (folder / subset).mkdir(parents=True)
        for number in range(3):
            part = rows[number * len(rows) // 3 : (number + 1) * len(rows) // 3]
            table = pyarrow.table({"text": part, "url": ["x" * 500] * len(part)})
            path = folder / subset / f"00{number}.parquet"
            pyarrow.parquet.write_table(table, path, row_group_size=10)
    (folder / "README.md").write_text(CARD)
    load = datasets.load_dataset_builder
    monkeypatch.setattr(
        datasets, "load_dataset_builder", lambda _, subset, **__: load(str(folder), subset)
    )
    return folder


@pytest.fixture
def config(tmp_path: Path, dataset: Path) -> CorpusConfig:
    target = str(tmp_path / "corpus")
    return CorpusConfig(target, NAME, "bpe:300", val_fraction=0.1, hf_subset="sample-10BT")


@pytest.fixture
def expected(tmp_path: Path, texts: list[str]) -> str:
    """The hash of the corpus of the same documents in a file."""
    path = tmp_path / "texts.jsonl"
    write_rows(path, texts)
    config = CorpusConfig(str(tmp_path / "expected"), f"files:{path}", "bpe:300", val_fraction=0.1)
    return prepare(config, progress=False).corpus_hash


def test_prepare_of_a_dataset_reads_the_row_groups_of_its_subset(
    config: CorpusConfig, expected: str
) -> None:
    assert prepare(config, progress=False, workers=1, part_bytes=4000).corpus_hash == expected
    for key, value, message in (
        ("hf_subset", "sample-1BT", "sample-10BT"),
        ("hf_split", "test", "hf_split 'test'"),
        ("text_field", "content", "'content'"),
    ):
        with pytest.raises(ConfigError, match=message):
            prepare(replace(config, dir=f"{config.dir}-1", **{key: value}), progress=False)


def test_prepare_of_a_dataset_of_other_files_is_refused(
    config: CorpusConfig, dataset: Path, texts: list[str]
) -> None:
    for path in dataset.glob("*/*/*.parquet"):
        path.unlink()
    for folder in dataset.glob("*/*"):
        write_rows(folder / "rows.jsonl", texts)
    with pytest.raises(ConfigError, match=rf"^{NAME} is .*rows\.jsonl; .*files:PATH"):
        prepare(config, progress=False)


def test_manifest_has_the_revision_of_a_dataset(
    config: CorpusConfig, dataset: Path, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the addresses of its files, which stay readable here by a folder of that name."""
    named = dataset.rename(dataset.with_name(f"texts@{'a' * 40}"))
    files = {"train": sorted(map(str, named.glob("sample/10BT/*")))}
    builder = SimpleNamespace(config=SimpleNamespace(data_files=files))
    asked = []

    def load(name: str, subset: str, revision: str | None) -> SimpleNamespace:
        asked.append((name, revision))
        return builder

    monkeypatch.setattr(datasets, "load_dataset_builder", load)
    made = prepare(config, progress=False)
    assert made.packages == {NAME: "a" * 40} and made.corpus_hash == expected
    pinned = replace(config, dir=f"{config.dir}-2", source=f"{NAME}@{'a' * 40}")
    assert prepare(pinned, progress=False).corpus_hash == expected
    assert asked == [("nobody/texts", None), ("nobody/texts", "a" * 40)]


def test_prepare_of_a_hub_that_refuses_names_the_reason(
    config: CorpusConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("429 Client Error: Too Many Requests\n\nwait")

    monkeypatch.setattr(datasets, "load_dataset_builder", refuse)
    with pytest.raises(ConfigError, match=f"^{NAME} .*429 .*HF_TOKEN"):
        prepare(config, progress=False)
    assert not list(Path(config.dir).parent.glob("corpus*"))
