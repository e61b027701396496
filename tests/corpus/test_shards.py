"""Reading: sequences by number are the shards; nothing is written or said."""

from pathlib import Path

import pytest
import torch

from lightning_sv.corpus import Sequences, TokenLoader, open_split
from lightning_sv.corpus.sampler import RankShare
from tests.corpus.conftest import shard_ids

SEQ = 96


def by_hand(corpus: Path) -> list[list[int]]:
    return [
        ids[start : start + SEQ + 1].tolist()
        for ids in shard_ids(corpus, "train")
        for start in range(0, ids.size - SEQ, SEQ + 1)
    ]


def test_sequences_are_the_blocks_of_the_shards(corpus: Path) -> None:
    sequences = open_split(corpus, "train", seq_len=SEQ)
    items = [sequences[i] for i in range(len(sequences))]
    assert all(item.dtype == torch.int64 and item.shape == (SEQ + 1,) for item in items)
    assert [item.tolist() for item in items] == by_hand(corpus)
    assert isinstance(sequences, Sequences) and [*iter(sequences)][-1].tolist() == items[-1].tolist()
    for beyond in (-1, len(sequences)):
        with pytest.raises(IndexError, match=f"sequence {beyond} of {len(sequences)}"):
            sequences[beyond]


def test_token_loader_writes_and_prints_nothing(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    before = sorted(corpus.rglob("*"))
    for workers in (0, 2):
        _ = list(TokenLoader(open_split(corpus, "train", seq_len=SEQ), RankShare(8, 4), num_workers=workers))
    assert sorted(corpus.rglob("*")) == before
    assert not list(tmp_path.iterdir())
    assert capfd.readouterr() == ("", "")
