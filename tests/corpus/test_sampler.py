"""Sequences of the shards, and their order in a run: the seed's alone, and resumed exactly
anywhere."""

import multiprocessing
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_sv.corpus import RankShare, Sequences, TokenLoader, open_split
from lightning_sv.corpus.sampler import GlobalBatchSampler
from lightning_sv.errors import ConfigError
from tests.conftest import thinned
from tests.corpus.conftest import shard_ids

SEQ, GLOBAL = 96, 8


def loader(corpus: Path, micro: int = 4, rank: int = 0, ranks: int = 1, **kwargs) -> TokenLoader:
    share = RankShare(kwargs.pop("global_batch", GLOBAL), micro, rank, ranks)
    return TokenLoader(
        open_split(corpus, "train", seq_len=kwargs.pop("seq_len", SEQ)),
        share,
        **{"seed": 1} | kwargs,
    )


def stream(made: TokenLoader, stop_at_len: bool = True) -> Iterator[Tensor]:
    """Epoch after epoch; Lightning stops after len() batches and leaves the iterator unfinished."""
    while True:
        yield from islice(iter(made), len(made)) if stop_at_len else made


def steps(batches: list[Tensor]) -> Tensor:
    """(steps, sequences of a step, SEQ + 1)."""
    return torch.cat(batches).unflatten(0, (-1, GLOBAL))


@settings(max_examples=60)
@given(
    parts=st.tuples(*[st.integers(1, 4)] * 3),
    steps=st.integers(1, 5),
    rest=st.integers(0, 3),
    seed=st.sampled_from([0, 7, 2**32 - 1]),
)
def test_sampler_devices_share_steps_and_an_epoch_repeats_nothing(
    parts: tuple[int, int, int], steps: int, rest: int, seed: int
) -> None:
    micro, accumulate, ranks = parts
    size = micro * accumulate * ranks
    n = steps * size + min(rest, size - 1)
    orders = [
        GlobalBatchSampler(n, RankShare(size, micro, rank, ranks), seed) for rank in range(ranks)
    ]
    alone = GlobalBatchSampler(n, RankShare(size, size), seed)
    epochs = []
    for epoch in range(2):
        for order in (*orders, alone):
            order.epoch = epoch
        assert all(len(list(order)) == len(order) == steps * accumulate for order in orders)
        read = (
            torch.tensor([list(order) for order in orders])
            .view(ranks, steps, -1)
            .transpose(0, 1)
            .flatten(1)
        )
        assert (
            read.tolist()
            == list(alone)
            == [orders[0].sequences(epoch, step) for step in range(steps)]
        )
        assert len(read.unique()) == read.numel() == steps * size and read.max() < n
        epochs.append(read)
    assert steps * size < 8 or not torch.equal(*epochs)


def test_sampler_every_seed_and_epoch_has_its_own_order() -> None:
    samplers = [GlobalBatchSampler(40, RankShare(4, 4), seed) for seed in range(3)]
    assert len({str(each.sequences(epoch, 0)) for each in samplers for epoch in range(3)}) == 9


def test_token_loader_steps_are_equal_for_all_devices_and_workers(corpus: Path) -> None:
    whole = steps(list(islice(stream(loader(corpus, GLOBAL)), 60)))
    assert len(whole) > len(loader(corpus, GLOBAL))
    for workers in (0, 2):
        assert torch.equal(
            steps(list(islice(stream(loader(corpus, 2, num_workers=workers)), 240))), whole
        )
    halves = [list(islice(stream(loader(corpus, 2, rank, 2)), 120)) for rank in range(2)]
    together = [
        torch.cat([half[2 * i + j] for half in halves for j in range(2)]) for i in range(60)
    ]
    assert torch.equal(steps(together), whole)
    assert not torch.equal(steps(list(islice(stream(loader(corpus, GLOBAL, seed=2)), 60))), whole)


@pytest.mark.parametrize(
    ("stop_at_len", "workers"),
    thinned([(s, w) for s in (True, False) for w in (0, 2)], [(True, 0), (False, 2)], several=True),
)
def test_token_loader_resumed_equals_uninterrupted(
    corpus: Path, workers: int, stop_at_len: bool
) -> None:
    length = len(loader(corpus))
    total = 2 * length + 4
    whole = list(islice(stream(loader(corpus)), total))
    for point in (2, length - 2, length, length + 2):
        before = loader(corpus, num_workers=workers)
        running = stream(before, stop_at_len)
        batches = list(islice(running, point))
        state = before.state_dict()
        after = loader(corpus, num_workers=2 - workers)  # a different number of workers
        after.load_state_dict(state)
        assert after.state_dict() == state  # saved again before a batch was taken
        batches += islice(stream(after, stop_at_len), total - point)
        assert all(map(torch.equal, batches, whole)) and len(batches) == len(whole), point


def test_token_loader_resumes_on_other_devices(corpus: Path) -> None:
    """Three steps on two devices, three on one with other micro-batches, three on two."""
    whole = steps(list(islice(stream(loader(corpus, GLOBAL)), 9)))
    seen: list[Tensor] = []
    state = None
    for ranks, micro in ((2, 2), (1, 4), (2, 4)):
        made = [loader(corpus, micro, rank, ranks) for rank in range(ranks)]
        for each in made:
            if state is not None:
                each.load_state_dict(state)
        accumulate = made[0].order.share.accumulate
        read = [list(islice(stream(each), 3 * accumulate)) for each in made]
        for step in range(3):
            seen += [
                torch.cat(
                    [b for part in read for b in part[step * accumulate : (step + 1) * accumulate]]
                )
            ]
        states = [each.state_dict() for each in made]
        assert all(other == states[0] for other in states)
        state = states[0]
    assert torch.equal(steps(seen), whole)


def test_load_state_dict_different_settings_are_refused(corpus: Path, tmp_path: Path) -> None:
    before = loader(corpus)
    _ = list(islice(stream(before), 3))
    with pytest.raises(ConfigError, match="inside an optimizer step"):
        loader(corpus).load_state_dict(before.state_dict())
    before = loader(corpus)
    _ = list(islice(stream(before), 4))
    state = before.state_dict()
    for change, match in (
        ({"seed": 5}, "seed is 5; expected 1"),
        ({"seq_len": 32}, "seq_len is 32; expected 96"),
        ({"global_batch": 4}, "global_batch is 4; expected 8"),
    ):
        with pytest.raises(ConfigError, match=match):
            loader(corpus, **change).load_state_dict(state)
    with pytest.raises(ConfigError, match="data position"):
        loader(corpus).load_state_dict({"dataset": {}})
    loader(Path(shutil.copytree(corpus, tmp_path / "moved"))).load_state_dict(state)
    with pytest.raises(ConfigError, match="expected 000000000000"):
        loader(corpus).load_state_dict(state | {"corpus_hash": "0" * 64})


def test_sampler_too_few_sequences_are_refused(corpus: Path) -> None:
    with pytest.raises(ConfigError, match="data.global_batch"):
        loader(corpus, 100_000, global_batch=100_000)


def test_token_loader_workers_outlive_a_signal(corpus: Path) -> None:
    """With several threads, which Lightning sets for ranks, torch starts one in a worker before
    anything else."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        batches = iter(loader(corpus, num_workers=1))
        next(batches)
        (worker,) = multiprocessing.active_children()
        subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)  # not from its parent
        assert len(list(islice(batches, 20))) == 20 and worker.is_alive()
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGTERM, signal.SIGINT}
    finally:
        torch.set_num_threads(before)


def test_sequences_are_the_blocks_of_the_shards(corpus: Path) -> None:
    sequences = open_split(corpus, "train", seq_len=SEQ)
    items = [sequences[i] for i in range(len(sequences))]
    assert all(item.dtype == torch.int64 and item.shape == (SEQ + 1,) for item in items)
    assert [item.tolist() for item in items] == [
        ids[start : start + SEQ + 1].tolist()
        for ids in shard_ids(corpus, "train")
        for start in range(0, ids.size - SEQ, SEQ + 1)
    ]
    assert (
        isinstance(sequences, Sequences) and [*iter(sequences)][-1].tolist() == items[-1].tolist()
    )
    for beyond in (-1, len(sequences)):
        with pytest.raises(IndexError, match=f"sequence {beyond} of {len(sequences)}"):
            sequences[beyond]


def test_token_loader_writes_and_prints_nothing(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    before = sorted(corpus.rglob("*"))
    for workers in (0, 2):
        _ = list(loader(corpus, num_workers=workers))
    assert sorted(corpus.rglob("*")) == before
    assert not list(tmp_path.iterdir())
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("num_workers", "free_batches", "is_refused"), [(2, 3, True), (2, 4, False), (0, 0, False)]
)
def test_shared_memory_too_small_for_the_workers_is_refused(
    num_workers: int,
    free_batches: int,
    is_refused: bool,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch_bytes = 4 * (SEQ + 1) * 8
    disk = SimpleNamespace(free=free_batches * batch_bytes)
    monkeypatch.setattr("lightning_sv.corpus.sampler.shutil.disk_usage", lambda folder: disk)
    with pytest.raises(ConfigError, match="/dev/shm.*num_workers") if is_refused else nullcontext():
        loader(corpus, num_workers=num_workers)
