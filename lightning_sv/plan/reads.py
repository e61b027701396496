"""Data that a run reads."""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lightning_sv.corpus import Manifest
from lightning_sv.corpus.estimate import sufficient_tokens
from lightning_sv.corpus.manifest import FILENAME
from lightning_sv.settings.data import DataConfig


@dataclass(frozen=True)
class Reads:
    """Training data of one rank: sequences, predicted tokens, and bytes of token ids.

    Attributes:
        epochs: passes of all ranks over the corpus; None if it is not prepared and its name has no
            token count
        prepared: True if the corpus is prepared; otherwise epochs follow from its name, such as
            sample-10BT
        sufficient_tokens: data.corpus.max_tokens with which the run reads no sequence twice
    """

    sequences_per_step: int
    tokens_per_step: int
    bytes_per_step: int
    sequences: int
    tokens: int
    bytes: int
    epochs: float | None
    prepared: bool
    sufficient_tokens: int


def training_reads(data: DataConfig, vocab_size: int, share: int, steps: int) -> Reads:
    """Return what a rank with `share` sequences per step reads in `steps` steps."""
    is_prepared = (Path(data.corpus.dir).expanduser() / FILENAME).is_file()
    manifest = data.manifest if is_prepared else None
    size = (data.seq_len + 1) * _bytes_per_token(manifest, vocab_size)
    sequences = steps * share
    return Reads(
        sequences_per_step=share,
        tokens_per_step=share * data.seq_len,
        bytes_per_step=share * size,
        sequences=sequences,
        tokens=sequences * data.seq_len,
        bytes=sequences * size,
        epochs=_epochs(manifest, data, steps),
        prepared=is_prepared,
        sufficient_tokens=needed_tokens(data, steps),
    )


def needed_tokens(data: DataConfig, steps: int) -> int:
    """Return a data.corpus.max_tokens with which a run of `steps` steps reads no sequence twice."""
    sequences = steps * data.global_batch
    return sufficient_tokens(sequences, data.seq_len, data.corpus.val_fraction)


def _bytes_per_token(manifest: Manifest | None, vocab_size: int) -> int:
    if manifest is not None:
        return np.dtype(manifest.dtype).itemsize
    return 2 if vocab_size <= 1 << 16 else 4


def _epochs(manifest: Manifest | None, data: DataConfig, steps: int) -> float | None:
    """Return the passes over the corpus, from its manifest or from a name such as sample-10BT.

    None if neither is known, or if the corpus has no sequence of this length.
    """
    if manifest is None:
        return _epochs_by_name(data, steps)
    sequences = manifest.train.sequences(data.seq_len)
    if sequences == 0:
        return None
    return steps * data.global_batch / sequences


def _epochs_by_name(data: DataConfig, steps: int) -> float | None:
    named = re.search(r"(\d+)BT$", data.corpus.hf_subset or "")
    if named is None:
        return None
    corpus_tokens = int(named[1]) * 1e9
    return steps * data.tokens_per_step / corpus_tokens
