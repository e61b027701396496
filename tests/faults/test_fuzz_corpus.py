"""Hostile manifests, indexes, shards, tokenizers and texts: read, or refused with one sentence."""

from __future__ import annotations

import gzip
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sv.corpus import CorpusConfig, Manifest, Tokenizer, check_corpus, open_split, prepare
from tests.faults.conftest import Tally
from tests.faults.fuzz import attempt, budget, edited, few_and_all, json_bytes, mangled

Fuzz = Callable[[Tally, Path, int], None]


@pytest.fixture(scope="module")
def copy(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(corpus, tmp_path_factory.mktemp("fuzz") / "copy"))


def read(root: Path) -> None:
    """What training does with a corpus: check it, read a block of each split and its tokenizer."""
    manifest = Manifest.load(root)
    check_corpus(manifest, root, vocab_size=1 << 16, seq_len=8)
    for split in ("train", "val"):
        block = open_split(root, split, seq_len=8)[0]
        assert block.max() < manifest.vocab_size
    Tokenizer.load(root).encode("word")


def fuzz_file(tally: Tally, fault: str, root: Path, name: str, n: int) -> None:
    """Read the corpus with one file replaced, then put the file back."""
    path = root / name
    good = path.read_bytes()
    hostile = mangled(good)
    if name.endswith(".json"):
        hostile = st.one_of(edited(json.loads(good)).map(json_bytes), hostile)

    @budget(n)
    @given(hostile)
    def run(raw: bytes) -> None:
        path.write_bytes(raw)
        attempt(tally, fault, lambda: read(root))

    try:
        run()
    finally:
        path.write_bytes(good)


def fuzz_tokenizer(tally: Tally, root: Path, n: int) -> None:
    """A tokenizer.json whose hash nobody checks, as in a run directory."""
    good = json.loads((root / "tokenizer.json").read_text())

    @budget(n)
    @given(st.one_of(edited(good).map(json_bytes), mangled(json_bytes(good))))
    def run(raw: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "tokenizer.json").write_bytes(raw)

            def use() -> None:
                tokenizer = Tokenizer.load(folder)
                tokenizer.decode(tokenizer.encode("def naïve(): return 1"))

            attempt(tally, "hostile tokenizer of a run", use)

    run()


LINE = st.one_of(
    st.binary(max_size=60),
    st.text(max_size=40).map(lambda text: json.dumps({"text": text}).encode()),
    st.sampled_from(
        [b"[" * 100_000, b'{"text":' * 5_000, b"1" * 5_000, b'{"text": "\\ud800"}', b"\xff\xfe", b"null", b"NaN"]
    ),
    st.dictionaries(
        st.sampled_from(["text", "Text", "id"]), st.one_of(st.none(), st.integers(), st.text(max_size=9))
    ).map(json_bytes),
)
SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".txt", ".md", ".py")


def fuzz_sources(tally: Tally, n: int) -> None:
    @budget(n)
    @given(st.sampled_from(SUFFIXES), st.lists(LINE, max_size=6), st.booleans(), st.data())
    def run(suffix: str, lines: list[bytes], good_rows: bool, data: st.DataObject) -> None:
        rows = [json_bytes({"text": f"{i} {'word ' * 30}"}) for i in range(12)] if good_rows else []
        raw = b"\n".join([*rows, *lines])
        if suffix.endswith(".gz"):
            raw = data.draw(mangled(gzip.compress(raw, mtime=0)))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"text{suffix}"
            path.write_bytes(raw)
            config = CorpusConfig(dir=f"{folder}/corpus", source=f"files:{path}", tokenizer="bpe:257", val_fraction=0.3)
            attempt(tally, "hostile text", lambda: prepare(config, progress=False))

    run()


def fuzz_named(kind: str, name: str) -> Fuzz:
    return lambda tally, copy, n: fuzz_file(tally, f"hostile {kind}", copy, name, n)


FUZZ: dict[str, tuple[Fuzz, int]] = {
    "manifest": (fuzz_named("manifest", "manifest.json"), 2000),
    "index": (fuzz_named("index", "train/index.json"), 700),
    "shard": (fuzz_named("shard", "val/chunk-0-0.bin"), 700),
    "tokenizer": (fuzz_named("tokenizer", "tokenizer.json"), 300),
    "tokenizer of a run": (fuzz_tokenizer, 500),
    "text": (lambda tally, copy, n: fuzz_sources(tally, n), 1000),
}


@pytest.mark.parametrize(("kind", "n"), few_and_all({kind: n for kind, (_, n) in FUZZ.items()}, few=20))
def test_hostile_corpus_files_are_read_or_refused(copy: Path, tally: Tally, kind: str, n: int) -> None:
    FUZZ[kind][0](tally, copy, n)
