"""The corpus on the device: all sequences as one tensor, and the order of a run as another."""

import math

import numpy as np
import torch
from torch import Tensor

from lightning_sv.corpus import CorpusConfig, Manifest, Share, check_corpus, iter_tokens
from lightning_sv.corpus.order import GlobalOrder
from lightning_sv.settings.data import Batches


class Text:
    """Sequences of seq_len + 1 ids of both splits, int32, on a device.

    Args:
        corpus: what is trained on, prepared
        seq_len: tokens a sequence predicts
        val_sequences: validation reads so many, evenly spread over its split, always the same
        device: that holds them: 4 bytes a token

    Raises:
        ValueError: a split has no sequence, or the corpus is damaged
    """

    def __init__(self, corpus: CorpusConfig, seq_len: int, val_sequences: int, device: torch.device):
        self.manifest = Manifest.load(corpus.dir)
        check_corpus(self.manifest, corpus.dir, seq_len=seq_len, tokenizer=corpus.tokenizer, checksums=False)
        self.train = self._sequences(corpus.dir, "train", seq_len).to(device)
        held_out = self._sequences(corpus.dir, "val", seq_len)
        self.val = held_out[Batches.spread(len(held_out), val_sequences)].to(device).long()

    @staticmethod
    def _sequences(folder: str, split: str, seq_len: int) -> Tensor:
        """(sequences, seq_len + 1): each shard cut from its start, what fills no sequence left out."""
        width = seq_len + 1
        parts = [
            np.asarray(ids[: len(ids) // width * width]).astype(np.int32).reshape(-1, width)
            for ids in iter_tokens(folder, split)  # type: ignore[arg-type]
        ]
        return torch.from_numpy(np.concatenate(parts))

    def order(self, seed: int, global_batch: int, steps: int) -> Tensor:
        """(steps, global_batch) numbers of the sequences of every step, as `TokenLoader` reads them on one device.

        Raises:
            ValueError: the split has fewer sequences than a global batch
        """
        order = GlobalOrder(len(self.train), Share(global_batch, global_batch), seed % 2**31)
        rows: list[list[int]] = []
        for epoch in range(math.ceil(steps / len(order))):
            order.epoch = epoch
            rows += list(order)
        return torch.tensor(rows[:steps], dtype=torch.int64, device=self.train.device)
