"""Sequences of the shards, and their order in a run: the seed's alone, and resumed exactly
anywhere."""

import multiprocessing
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_sv.corpus import Epochs, RankShare, TokenLoader, open_split
from lightning_sv.corpus.sampler import GlobalBatchSampler
from lightning_sv.errors import ConfigError, RunError
from tests.corpus.conftest import shard_ids

SEQ = 96
GLOBAL = 8


def loader(corpus: Path, micro: int = 4, rank: int = 0, ranks: int = 1, **kwargs) -> TokenLoader:
    share = RankShare(kwargs.pop("global_batch", GLOBAL), micro, rank, ranks)
    sequences = open_split(corpus, "train", seq_len=kwargs.pop("seq_len", SEQ))
    return TokenLoader(sequences, share, **{"seed": 1} | kwargs)


def stream(made: TokenLoader, stop_at_len: bool = True) -> Iterator[Tensor]:
    """Epoch after epoch; Lightning stops after len() batches and leaves the iterator unfinished."""
    while True:
        yield from islice(iter(made), len(made)) if stop_at_len else made


def first_steps(made: TokenLoader, number: int) -> Tensor:
    """(steps, sequences of a step, SEQ + 1)."""
    batches = islice(stream(made), number * made.order.share.accumulate)
    return torch.cat(list(batches)).unflatten(0, (number, -1))


def on_ranks(loaders: list[TokenLoader], number: int) -> Tensor:
    """The same steps, each read by several ranks."""
    return torch.cat([first_steps(made, number) for made in loaders], 1)


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
    shares = [RankShare(size, micro, rank, ranks) for rank in range(ranks)]
    orders = [GlobalBatchSampler(n, share, seed) for share in shares]
    alone = GlobalBatchSampler(n, RankShare(size, size), seed)
    epochs = []
    for epoch in range(2):
        for order in (*orders, alone):
            order.epoch = epoch
        assert len(orders[0]) == steps * accumulate
        of_ranks = torch.tensor([list(order) for order in orders])
        read = of_ranks.view(ranks, steps, -1).transpose(0, 1).flatten(1)  # steps, size
        assert read.tolist() == list(alone)
        assert read.tolist() == [orders[0].sequences(epoch, step) for step in range(steps)]
        assert len(read.unique()) == read.numel() == steps * size and read.max() < n
        epochs.append(read)
    assert steps * size < 8 or not torch.equal(*epochs)


def test_token_loader_steps_are_equal_for_all_devices_and_workers(corpus: Path) -> None:
    whole = first_steps(loader(corpus, GLOBAL), 60)
    assert len(whole) > len(loader(corpus, GLOBAL))
    for workers in (0, 2):
        assert torch.equal(first_steps(loader(corpus, 2, num_workers=workers), 60), whole)
    halves = [loader(corpus, 2, rank, 2) for rank in range(2)]
    assert torch.equal(on_ranks(halves, 60), whole)
    assert not torch.equal(first_steps(loader(corpus, GLOBAL, seed=2), 60), whole)


@pytest.mark.parametrize(("stop_at_len", "workers"), [(True, 0), (False, 2)])
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
    whole = first_steps(loader(corpus, GLOBAL), 9)
    seen: list[Tensor] = []
    state = None
    for ranks, micro in ((2, 2), (1, 4), (2, 4)):
        made = [loader(corpus, micro, rank, ranks) for rank in range(ranks)]
        if state is not None:
            for each in made:
                each.load_state_dict(state)
        seen.append(on_ranks(made, 3))
        state = made[0].state_dict()
        assert made[-1].state_dict() == state
    assert torch.equal(torch.cat(seen), whole)


def test_token_loader_repeats_the_step_that_was_begun(corpus: Path) -> None:
    whole = list(islice(stream(loader(corpus)), 4))
    before = loader(corpus)
    _ = list(islice(stream(before), 3))
    with pytest.raises(ConfigError, match="inside"):
        loader(corpus).load_state_dict(before.state_dict())
    after = loader(corpus, epochs=Epochs(repeats_begun_step=True))
    after.load_state_dict(before.state_dict())
    assert all(map(torch.equal, islice(stream(after), 2), whole[2:]))


def test_load_state_dict_different_settings_are_refused(corpus: Path, tmp_path: Path) -> None:
    before = loader(corpus)
    _ = list(islice(stream(before), 4))
    state = before.state_dict()
    for key, value in {"seed": 5, "seq_len": 32, "global_batch": 4}.items():
        with pytest.raises(ConfigError, match=f"data.{key} is {value}"):
            loader(corpus, **{key: value}).load_state_dict(state)
    with pytest.raises(ConfigError, match="different format"):
        loader(corpus).load_state_dict({})  # of a checkpoint without a fit
    loader(Path(shutil.copytree(corpus, tmp_path / "moved"))).load_state_dict(state)
    with pytest.raises(ConfigError, match="data.corpus_hash"):
        loader(corpus).load_state_dict(state | {"corpus_hash": "0" * 64})


def test_load_state_dict_limit_of_other_devices_is_refused(corpus: Path) -> None:
    """`limit_train_batches` counts micro-batches of one device."""
    before = loader(corpus, 2, epochs=Epochs(limit=8))
    _ = list(islice(stream(before), 4))
    state = before.state_dict()
    loader(corpus, 2, 0, 2, epochs=Epochs(limit=4)).load_state_dict(state)
    same_limit = loader(corpus, 2, 0, 2, epochs=Epochs(limit=8))
    with pytest.raises(ConfigError, match=r"trainer\.limit_train_batches"):
        same_limit.load_state_dict(state)


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


def replace_manifest(folder: Path) -> None:
    """As a corpus that grows does; litdata would map the new shards by the old index."""
    shutil.copy(folder / "manifest.json", folder / "new.json")
    (folder / "new.json").replace(folder / "manifest.json")


@pytest.mark.parametrize(("change", "workers"), [
    (replace_manifest, 0),
    (replace_manifest, 1),
    (shutil.rmtree, 0),
])  # fmt: skip
def test_token_loader_of_a_replaced_corpus_ends_with_a_sentence(
    change: Callable[[Path], None], workers: int, corpus: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(corpus, tmp_path / "corpus")
    made = loader(folder, num_workers=workers)
    batches = iter(made)
    next(batches)
    change(folder)
    started = made.sequences.corpus_hash[:12]
    with pytest.raises(RunError, match=f"was replaced; expected corpus {started}") as caught:
        list(batches)
    assert "\n" not in str(caught.value)


def test_sequences_are_the_blocks_of_the_shards(corpus: Path) -> None:
    sequences = open_split(corpus, "train", seq_len=SEQ)
    items = [sequences[i] for i in range(len(sequences))]
    assert all(item.dtype == torch.int64 and item.shape == (SEQ + 1,) for item in items)
    expected = []
    for ids in shard_ids(corpus, "train"):
        n = ids.size // (SEQ + 1)
        expected += ids[: n * (SEQ + 1)].reshape(n, -1).tolist()
    assert [item.tolist() for item in items] == expected
    for beyond in (-1, len(sequences)):
        with pytest.raises(IndexError):
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
