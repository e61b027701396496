"""Parts: the same corpus for any number of parts, processes and interruptions; duplicates, limits,
bad input."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_sv.atomic import remove
from lightning_sv.cli.names import resolve_names
from lightning_sv.cli.prepare import prepare_for_run
from lightning_sv.corpus import CorpusConfig, Manifest, assemble, prepare
from lightning_sv.corpus.job import parts_folder
from lightning_sv.corpus.parts import DOCUMENT
from lightning_sv.corpus.selection import Selection
from lightning_sv.errors import ConfigError
from lightning_sv.lit.run_arguments import check_run
from lightning_sv.plan.plan import sufficient_tokens
from lightning_sv.settings.data import DataConfig
from tests.corpus.conftest import write_rows

PART_BYTES = 5000


@pytest.fixture
def unique(texts: list[str]) -> list[str]:
    """The texts, and one that is larger than a shard."""
    return [*texts, " ".join(texts[:100])]


@pytest.fixture
def repeated(tmp_path: Path, unique: list[str]) -> CorpusConfig:
    """Two files with duplicates within and between parts."""
    write_rows(tmp_path / "a.jsonl", unique[:200] + unique[150:160])
    write_rows(tmp_path / "b.jsonl", unique[100:] + unique[:3])
    source = f"files:{tmp_path}/a.jsonl,{tmp_path}/b.jsonl"
    return CorpusConfig(
        str(tmp_path / "corpus"), source, "bpe:300", val_fraction=0.1, chunk_bytes="8KB"
    )


def prepared(config: CorpusConfig, name: str, **options: Any) -> Manifest:
    config = replace(config, dir=str(Path(config.dir).with_name(name)))
    return prepare(config, progress=False, **options)


@pytest.mark.parametrize("max_bytes", [None, 30_000])
def test_prepare_any_parts_and_workers_give_the_same_corpus(
    repeated: CorpusConfig, unique: list[str], max_bytes: int | None
) -> None:
    repeated = replace(repeated, max_bytes=max_bytes)
    whole = prepared(repeated, "whole", workers=1)
    largest = max(shard.tokens for shard in whole.shards)
    assert (2 * largest > 8 << 10) == (max_bytes is None)
    sizes = np.array([len(text.encode()) for text in unique]).cumsum()
    n_documents = int((sizes <= (max_bytes or math.inf)).sum())
    assert whole.train.documents + whole.val.documents == n_documents
    assert whole.train.bytes + whole.val.bytes == sizes[n_documents - 1]
    assert whole.duplicates == (113 if max_bytes is None else 0)
    for workers in (1, 2):
        parts = prepared(repeated, f"parts{workers}", part_bytes=PART_BYTES, workers=workers)
        assert parts == whole


def test_prepare_max_tokens_limits_the_corpus(repeated: CorpusConfig, tmp_path: Path) -> None:
    whole = prepared(repeated, "whole", workers=1)
    total = whole.train.tokens + whole.val.tokens
    limited = replace(repeated, max_tokens=total // 3)
    small = prepared(limited, "small", part_bytes=PART_BYTES, workers=1)
    assert total // 3 - 400 < small.train.tokens + small.val.tokens <= total // 3
    assert not (tmp_path / "small.parts").exists()
    more = prepared(replace(repeated, max_tokens=total + 1), "more", workers=1)
    assert more.corpus_hash == whole.corpus_hash
    with pytest.raises(ConfigError, match="max_tokens="):
        prepared(replace(repeated, max_tokens=total), "small", workers=1)


def test_prepare_max_tokens_before_the_first_validation_document_is_refused(
    repeated: CorpusConfig,
) -> None:
    """The parts stay, so that a larger number continues."""
    with pytest.raises(ConfigError, match="max_tokens is 300"):
        prepared(replace(repeated, max_tokens=300), "few", part_bytes=PART_BYTES, workers=1)
    assert prepared(replace(repeated, max_tokens=3000), "few", workers=1).val.documents


def count_parts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the encoded parts of each preparation, by the name of its folder, at its end."""
    counts: Counter[str] = Counter()

    def counting_remove(folder: Path) -> None:
        counts[folder.name] += len(list(folder.glob("[0-9]*/documents.npy")))
        remove(folder)

    monkeypatch.setattr(assemble, "remove", counting_remove)
    return counts


def test_sufficient_tokens_feed_a_run(repeated: CorpusConfig) -> None:
    data = DataConfig(repeated, seq_len=31, global_batch=20)
    enough = sufficient_tokens(data, steps=10)
    manifest = prepared(replace(repeated, max_tokens=enough), "enough", workers=1)
    assert 200 <= manifest.train.sequences(31) < 1.2 * 200


def test_training_by_name_leaves_a_part_of_a_text_as_it_is(
    repeated: CorpusConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text that is prepared for a run has the settings of its command
    line."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf/data").mkdir(parents=True)
    corpus = {"dir": "data/some", "source": repeated.source, "tokenizer": "bpe:300"}
    data = {"corpus": corpus | {"val_fraction": 0.1}}
    (tmp_path / "conf/data/some.yaml").write_text(json.dumps({"data": data}))
    backbone = {"d_model": 16, "n_layer": 1, "n_head": 1, "vocab_size": 300}
    model = tmp_path / "model.yaml"
    model.write_text(json.dumps({"model": {"backbone": backbone, "optim": {"lr": 0.01}}}))
    options = ["--config", str(model), "--trainer.max_steps=9"]
    options += ["--data.seq_len=8", "--data.global_batch=2"]
    for words in (["--data.corpus.max_tokens=4000"], []):
        named = resolve_names(["--data", "some", *options, *words])
        prepare_for_run(named, lambda words: check_run(words).data)
        manifest = Manifest.load("data/some")
        assert manifest.settings["max_tokens"] == 4000
        assert manifest.train.tokens + manifest.val.tokens <= 4000

    copy = Path("data/some").rename(tmp_path / "copy")
    named = resolve_names(["--data", "some", *options, f"--data.corpus.dir={copy}"])
    prepare_for_run(named, lambda words: check_run(words).data)
    assert not Path("data/some").exists()


@dataclass
class Table:
    """A part with hashes, and bytes equal to tokens."""

    hashes: list[int]

    def documents(self) -> np.ndarray:
        table = np.zeros(len(self.hashes), DOCUMENT)
        table["digest"] = np.array([(number, 7 * number) for number in self.hashes]).reshape(-1, 2)
        table["val_bytes"] = np.array(self.hashes) + 1
        table["train_tokens"] = table["val_bytes"]
        return table


def test_selection_is_a_set_that_is_filled_in_order() -> None:
    draw = random.Random(0)
    for _ in range(60):
        sizes = draw.choices(range(13), k=draw.randint(1, 6))
        parts: list[Any] = [Table(draw.choices(range(20), k=size)) for size in sizes]
        limit = draw.choice([math.inf, 15, 60, 10_000])
        expected = filled(parts, limit)
        value = None if limit == math.inf else int(limit)
        for key in ("max_bytes", "max_tokens"):
            config = CorpusConfig(source="installed", **{key: value})
            kept = Selection.of(parts, config)
            rows = kept.kept.tolist()
            assert (rows, kept.duplicates, kept.is_limited) == expected


def filled(parts: list[Table], limit: float) -> tuple[list[bool], int, bool]:
    """Return the rows that are kept, the number of duplicates, and True beyond the limit."""
    seen: set[int] = set()
    rows: list[bool] = []
    n_duplicates = 0
    is_over = False
    for number in chain.from_iterable(part.hashes for part in parts):
        is_new = number not in seen
        size = sum(seen) + len(seen) + number + 1
        is_over = is_over or (is_new and size > limit)
        rows.append(is_new and not is_over)
        if rows[-1]:
            seen.add(number)
        elif not is_over:
            n_duplicates += 1
    return rows, n_duplicates, is_over


SCRIPT = """
import json, sys
from lightning_sv.corpus import CorpusConfig, prepare
config, workers, part_bytes = map(json.loads, sys.argv[1:])
prepare(CorpusConfig(**config), progress=False, workers=workers, part_bytes=part_bytes)
"""


def start(
    config: CorpusConfig, workers: int, part_bytes: int, stderr: int | None = None
) -> subprocess.Popen:
    """Prepare a corpus in a process of its own, in small parts."""
    arguments = [json.dumps(asdict(config)), str(workers), str(part_bytes)]
    command = [sys.executable, "-c", SCRIPT, *arguments]
    return subprocess.Popen(command, start_new_session=True, stderr=stderr)


COMMAND_SCRIPT = """
import json, sys
from lightning_sv.__main__ import main
config, workers, part_bytes = map(json.loads, sys.argv[1:])
words = [f"--data.corpus.{key}={config[key]}" for key in ("dir", "source", "tokenizer")]
words += ["--data.corpus.val_fraction=0.1", "--data.corpus.chunk_bytes=8KB"]
main(["prepare", f"--workers={workers}", f"--part_bytes={part_bytes}", *words])
"""


@pytest.mark.parametrize("script", [SCRIPT, COMMAND_SCRIPT], ids=["function", "command"])
def test_prepare_in_a_script_without_main_guard(
    script: str, repeated: CorpusConfig, tmp_path: Path
) -> None:
    """The workers do not run the script again, which would wait for the lock for ever."""
    file = tmp_path / "script.py"
    file.write_text(f"print('the main script')\n{script}")
    arguments = [json.dumps(asdict(repeated)), "2", "5000"]
    printed = subprocess.check_output([sys.executable, file, *arguments], text=True, timeout=120)
    assert printed.count("the main script") == 1
    assert Manifest.load(repeated.dir) == prepared(repeated, "whole", workers=1)
    assert not parts_folder(Path(repeated.dir)).exists()


@pytest.mark.parametrize("key", ["max_tokens", "max_bytes"])
def test_prepare_encodes_few_parts_beyond_the_limit(
    key: str, repeated: CorpusConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are needed, and fewer than two more for each worker that is ahead."""
    encoded = count_parts(monkeypatch)
    whole = prepared(repeated, "whole", part_bytes=2000)
    totals = {
        "max_tokens": whole.train.tokens + whole.val.tokens,
        "max_bytes": whole.train.bytes + whole.val.bytes,
    }
    limited = replace(repeated, **{key: totals[key] // 10})
    for workers in (1, 2):
        prepared(limited, f"limited{workers}", part_bytes=2000, workers=workers)
    one = encoded["limited1.parts"]
    assert 1 < one <= encoded["whole.parts"] / 10 + 2
    assert one <= encoded["limited2.parts"] < one + 2 * 2
