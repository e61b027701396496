"""Reading: every block once, in an order the seed decides, and resumed bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_sv.corpus import TokenLoader, iter_tokens, open_split

SEQ, BATCH = 96, 4


def _loader(corpus: Path, workers: int = 0, **settings: object) -> TokenLoader:
    dataset = open_split(corpus, "train", **({"seq_len": SEQ, "seed": 1, "shuffle": True} | settings))  # type: ignore[arg-type]
    return TokenLoader(dataset, batch_size=BATCH, num_workers=workers)


def _stream(loader: TokenLoader, stop_at_len: bool = True) -> Iterator[Tensor]:
    """Epoch after epoch; Lightning stops after len() batches and leaves the iterator unfinished."""
    while True:
        yield from islice(iter(loader), len(loader)) if stop_at_len else loader


def _take(loader: TokenLoader, count: int) -> list[Tensor]:
    return list(islice(_stream(loader), count))


def _blocks(corpus: Path) -> list[list[int]]:
    return [
        ids[start : start + SEQ + 1].tolist()
        for ids in iter_tokens(corpus, "train")
        for start in range(0, ids.size - SEQ, SEQ + 1)
    ]


def test_blocks_in_order_are_the_shards(corpus: Path) -> None:
    dataset = open_split(corpus, "train", seq_len=SEQ, shuffle=False, drop_last=False)
    items = list(dataset)
    assert all(item.dtype == torch.int64 and item.shape == (SEQ + 1,) for item in items)
    assert [item.tolist() for item in items] == _blocks(corpus) == [block.tolist() for block in dataset[:]]
    assert dataset[3].tolist() == _blocks(corpus)[3]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_has_every_block_once_in_the_order_of_the_seed(corpus: Path, workers: int) -> None:
    loader = _loader(corpus, workers, drop_last=False)
    first, second = list(loader), list(loader)
    for epoch in (first, second):
        assert sorted(torch.cat(epoch).tolist()) == sorted(_blocks(corpus))
    assert torch.cat(first).tolist() != torch.cat(second).tolist()
    again = list(_loader(corpus, workers, drop_last=False))
    other = list(_loader(corpus, workers, drop_last=False, seed=2))
    assert torch.equal(torch.cat(again), torch.cat(first))
    assert not torch.equal(torch.cat(other), torch.cat(first))


def test_two_ranks_share_the_blocks(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    lengths = set()
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        monkeypatch.setenv("GLOBAL_RANK", str(rank))
        loader = _loader(corpus)
        lengths.add(len(loader))
        seen += torch.cat(list(loader)).tolist()
    blocks = _blocks(corpus)
    assert len(lengths) == 1 and len(seen) == len(blocks) // (2 * BATCH) * 2 * BATCH
    assert len({tuple(block) for block in seen}) == len(seen)
    assert {tuple(block) for block in seen} <= {tuple(block) for block in blocks}


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_resumed_stream_is_the_uninterrupted_one(corpus: Path, workers: int) -> None:
    length = len(_loader(corpus, workers))
    total = 3 * length
    whole = _take(_loader(corpus, workers), total)
    points = [1, length // 2, length - 1, length, length + 1, 2 * length]
    for point in points if workers == 0 else points[1:5]:
        before = _loader(corpus, workers)
        stream = _stream(before)
        batches = list(islice(stream, point))
        state = before.state_dict()
        after = _loader(corpus, workers)
        after.load_state_dict(state)
        assert after.state_dict() == state  # saved again before a batch was taken
        batches += _take(after, total - point)
        assert all(map(torch.equal, batches, whole)) and len(batches) == len(whole), point


@pytest.mark.parametrize("stop_at_len", [True, False])
def test_a_stream_resumed_twice_in_one_epoch(corpus: Path, stop_at_len: bool) -> None:
    length = len(_loader(corpus))
    whole = _take(_loader(corpus), 3 * length)
    batches: list[Tensor] = []
    state = None
    for point in (length // 3, length // 3, 2 * length):
        loader = _loader(corpus)
        if state is not None:
            loader.load_state_dict(state)
        stream = _stream(loader, stop_at_len)
        batches += islice(stream, point)
        state = loader.state_dict()
    assert len(batches) > 2 * length and all(map(torch.equal, batches, whole))


def test_a_moved_corpus_resumes_and_another_does_not(corpus: Path, tmp_path: Path) -> None:
    whole = _take(_loader(corpus), 8)
    before = _loader(corpus)
    _ = _take(before, 5)
    state = before.state_dict()
    after = _loader(Path(shutil.copytree(corpus, tmp_path / "moved")))
    after.load_state_dict(state)
    assert all(map(torch.equal, _take(after, 3), whole[5:]))
    state["dataset"]["corpus_hash"] = "0" * 64
    with pytest.raises(ValueError, match="trained on the corpus 000000000000, this is"):
        after.load_state_dict(state)


def test_what_cannot_resume_exactly_is_refused(corpus: Path) -> None:
    loader = _loader(corpus)
    _ = _take(loader, 3)
    state = loader.state_dict()
    with pytest.raises(ValueError, match=r"saved with 1 data worker\(s\), this run has 2"):
        _loader(corpus, workers=2).load_state_dict(state)
    with pytest.raises(ValueError, match="seed=1, this run has 5"):
        _loader(corpus, seed=5).load_state_dict(state)
    with pytest.raises(ValueError, match="persistent_workers=True cannot resume"):
        TokenLoader(loader.dataset, batch_size=1, num_workers=1, persistent_workers=True)


def test_two_ranks_resumed_as_one_see_each_block_once(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight sequences a step: four on each of two ranks, or eight on one, two at a time."""

    def loader(ranks: int, rank: int) -> TokenLoader:
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        monkeypatch.setenv("GLOBAL_RANK", str(rank))
        dataset = open_split(corpus, "train", seq_len=SEQ, seed=1, shuffle=True, unit=8 // ranks)
        return TokenLoader(dataset, batch_size=2, drop_last=True)

    whole = [block for rank in range(2) for block in torch.cat(list(loader(2, rank))).tolist()]
    assert len(whole) == len(_blocks(corpus)) // 8 * 8
    seen: list[list[int]] = []
    for rank in range(2):
        before = loader(2, rank)
        seen += torch.cat(_take(before, 6)).tolist()
        state = before.state_dict()
    after = loader(1, 0)
    after.load_state_dict(state)
    seen += torch.cat(list(after)).tolist()
    assert sorted(seen) == sorted(whole)
    assert len(torch.cat(list(after))) == len(whole)  # the next epoch is whole again


def test_accumulation_does_not_change_the_data(corpus: Path) -> None:
    streams = []
    for batch in (2, 8):
        dataset = open_split(corpus, "train", seq_len=SEQ, seed=1, shuffle=True, unit=8)
        loader = TokenLoader(dataset, batch_size=batch, drop_last=True)
        assert len(loader) * batch % 8 == 0
        streams.append(torch.cat([*loader, *loader]))
    assert torch.equal(*streams)


def test_reading_writes_nothing_and_says_nothing(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    before = sorted(corpus.rglob("*"))
    _ = list(_loader(corpus))
    assert sorted(corpus.rglob("*")) == before
    assert not list(tmp_path.iterdir())
    assert capfd.readouterr() == ("", "")
