"""Reading token shards: blocks of seq_len + 1 ids, shuffled by a seed, resumable to the block."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import litdata
import numpy as np
import torch
from litdata.streaming.item_loader import TokensLoader
from litdata.streaming.shuffle import FullShuffle, NoShuffle, Shuffle
from torch import Tensor

from lightning_sv.corpus.manifest import SPLITS, Manifest

Split = Literal["train", "val"]


def open_split(
    dir: str | Path,
    split: Split,
    *,
    seq_len: int,
    seed: int = 0,
    shuffle: bool,
    drop_last: bool | None = None,
    unit: int = 1,
) -> TokenDataset:
    """Open one split of a prepared corpus; hand it to a `TokenLoader`.

    Args:
        dir: Folder of the corpus.
        split: 'train' or 'val'.
        seq_len: Tokens a sequence; items have shape (seq_len + 1,), to be cut into inputs and targets.
        seed: Of the order, which also depends on the epoch, the unit, the number of workers and of ranks.
        shuffle: False reads in order.
        drop_last: Leave out the last batch if it is not full; None means for 'train' only. litdata leaves it out
            in any case when there are several ranks.
        unit: Sequences a device needs for one optimizer step; an epoch of 'train' then holds whole steps, and the
            order does not depend on the batch size that divides it (gradient accumulation).

    Raises:
        ValueError: The corpus is missing or damaged, or no shard holds a block of seq_len + 1 tokens.
    """
    if split not in SPLITS:
        raise ValueError(f"split={split!r} is not known; use one of {', '.join(SPLITS)}.")
    manifest = Manifest.load(dir)
    # Hashing belongs to set-up, once; sizes are checked whenever a split is opened, as it costs nothing.
    manifest.verify(dir, seq_len=seq_len, checksums=False)
    return TokenDataset(
        str(Path(dir).resolve() / split),
        item_loader=TokensLoader(block_size=seq_len + 1),
        shuffle=shuffle,
        seed=seed,
        drop_last=split == "train" if drop_last is None else drop_last,
        # litdata's default shuffles within runs of 256 blocks, which come from few documents.
        item_shuffle_window="full",
        corpus_hash=manifest.corpus_hash,
        unit=unit,
    )


class TokenDataset(litdata.StreamingDataset):
    """Blocks of one split, int64 of shape (seq_len + 1,); made by `open_split`.

    Reads the shards in place: no copy, no cache, no lock files. The order follows from the arguments of
    `open_split` alone, not from the file system or the environment.

    Args:
        corpus_hash: Of the corpus; a state saved on another one is refused, wherever the folder lies now.
        unit: What is dropped at the end of an epoch is what does not fill a unit, instead of a batch.
    """

    posix_fast: Any

    def __init__(self, *args: Any, corpus_hash: str, unit: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.corpus_hash = corpus_hash
        self.unit = unit
        if self.posix_fast is not None:
            # On network file systems litdata would shuffle within a window of shards only.
            self.posix_fast = replace(self.posix_fast, kind="posix")

    def __getitem__(self, index: Any) -> Any:
        """One block, or a list of blocks for a slice."""
        item = super().__getitem__(index)
        return [_to_tensor(block) for block in item] if isinstance(item, list) else _to_tensor(item)

    def state_dict(self, num_samples_yielded: int, num_workers: int, batch_size: int) -> dict[str, Any]:
        """The position, with the hash of the corpus; called by the loader."""
        state = super().state_dict(num_samples_yielded, num_workers, batch_size)
        ours = {
            "corpus_hash": self.corpus_hash,
            "initial_unit": (self._state_dict or {}).get("initial_unit", self.unit),
        }
        return {**copy.deepcopy(state), **ours}  # a copy: litdata goes on writing to its own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved position; called by the loader."""
        found = state_dict.get("corpus_hash")
        if found != self.corpus_hash:
            raise ValueError(
                f"The checkpoint was trained on the corpus {str(found)[:12]}, this is {self.corpus_hash[:12]}; "
                "resume with the same corpus, or start a new run."
            )
        mine = {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "item_loader": self.item_loader.state_dict(),
        }
        for name, value in mine.items():
            if state_dict[name] != value:
                raise ValueError(
                    f"The checkpoint's data has {name}={state_dict[name]}, this run has {value}; "
                    "resume with the same value, or start a new run."
                )
        # litdata identifies a dataset by its absolute path; the hash is the better witness.
        super().load_state_dict(copy.deepcopy(state_dict) | {"input_dir_path": self.input_dir.path})

    def _create_shuffler(self, cache: Any) -> Shuffle:
        shuffler = super()._create_shuffler(cache)
        assert isinstance(shuffler, FullShuffle | NoShuffle), type(shuffler)
        # An epoch is finished the way it was begun, also on another number of devices.
        unit = (self._state_dict or {}).get("initial_unit", self.unit)
        if isinstance(shuffler, FullShuffle) and unit > 1:
            return _UnitShuffle(shuffler.cache, shuffler.seed, shuffler.drop_last, unit)
        return shuffler


class _UnitShuffle(FullShuffle):
    """Shares blocks out among workers in whole units, whatever the batch size."""

    def __init__(self, cache: Any, seed: int, drop_last: bool, unit: int) -> None:
        super().__init__(cache, seed, drop_last, item_window=0)  # 0: a full permutation inside a shard
        self.unit = unit

    def get_chunks_and_intervals_per_workers(
        self, distributed_env: Any, num_workers: int, batch_size: int, current_epoch: int
    ) -> Any:
        assert self.unit % batch_size == 0, (self.unit, batch_size)
        return super().get_chunks_and_intervals_per_workers(distributed_env, num_workers, self.unit, current_epoch)


class TokenLoader(litdata.StreamingDataLoader):
    """Batches of blocks, int64 of shape (B, seq_len + 1), with an exact `state_dict`.

    litdata's loader keeps replaying the loaded position when a consumer stops after len(loader) batches, as
    Lightning does, instead of exhausting the iterator; here a loaded position counts for one iteration.

    Raises:
        ValueError: Persistent workers, which would not see a loaded state; or a state of another number of workers.
    """

    def __init__(self, dataset: TokenDataset, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("persistent_workers"):
            raise ValueError("persistent_workers=True cannot resume exactly; leave it out.")
        super().__init__(dataset, *args, **kwargs)
        self._loaded: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Tensor]:
        """Start an epoch, or continue the one that was loaded."""
        if self._loaded is None:
            self.restore = False
        for batch in super().__iter__():
            self._loaded = None
            yield batch
        self._loaded = None

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch handed out."""
        return copy.deepcopy(self._loaded) if self._loaded is not None else super().state_dict()

    def load_state_dict(self, obj: dict[str, Any]) -> None:
        """Continue from a saved position in the next iteration."""
        workers = obj["dataset"]["num_workers"]
        if workers != (self.num_workers or 1):
            raise ValueError(
                f"The checkpoint was saved with {workers} data worker(s), this run has {self.num_workers}; "
                "the order of the data depends on it: resume with the same number."
            )
        super().load_state_dict(copy.deepcopy(obj))
        self._loaded = copy.deepcopy(obj)


def iter_tokens(dir: str | Path, split: Split) -> Iterator[np.ndarray]:
    """The ids of each shard of a split, 1-D, in order, mapped rather than read."""
    folder = Path(dir) / split
    dtype = Manifest.load(dir).dtype
    yield from iter_shards(folder, np.dtype(dtype))


def iter_shards(folder: Path, dtype: np.dtype) -> Iterator[np.ndarray]:
    """The ids of each shard below a folder with litdata's index.json."""
    for chunk in json.loads((folder / "index.json").read_text())["chunks"]:
        offset = 4 * (chunk["chunk_size"] + 2)  # the number of documents and their offsets, uint32
        yield np.memmap(folder / chunk["filename"], dtype=dtype, mode="r", offset=offset, shape=(chunk["dim"],))


def _to_tensor(block: np.ndarray) -> Tensor:
    return torch.from_numpy(block.astype(np.int64))
