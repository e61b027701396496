"""Batches of token ids: the check of those that a user's loader yields, and their documents."""

from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_sv.callbacks.run_state import data_of
from lightning_sv.errors import ConfigError
from lightning_sv.nn import document_ids


def check_block(block: Any, vocabulary: int) -> Tensor:
    """Return a user's batch of token ids as int64 or int32 (B, T + 1).

    Raises:
        ConfigError: a different type or shape, or ids outside of the vocabulary
    """
    tokens = _token_ids(block)
    is_on_host = tokens.device.type == "cpu"  # a look at the values would wait for another device
    if is_on_host and not torch.compiler.is_compiling():
        _check_range(tokens, vocabulary)
    return tokens


def _token_ids(block: Any) -> Tensor:
    """Return a matrix of integers in a type for which torch has all operations."""
    if not isinstance(block, Tensor):
        raise ConfigError(
            f"the batch is a {type(block).__name__}; expected a (B, T + 1) tensor of token ids."
        )
    is_matrix = block.ndim == 2 and block.shape[1] >= 2
    if not is_matrix or not _holds_integers(block):
        expected = "integer token ids (B, T + 1), with T of at least 1."
        raise ConfigError(f"the batch is {block.dtype} {tuple(block.shape)}; expected {expected}")
    return block if block.dtype == torch.int32 else block.long()


def _holds_integers(block: Tensor) -> bool:
    if block.dtype == torch.bool:
        return False
    return not (block.is_floating_point() or block.is_complex())


def _check_range(block: Tensor, vocabulary: int) -> None:
    low, high = block.aminmax()
    if low < 0 or high >= vocabulary:
        expected = f"0 to {vocabulary - 1}. Masked targets, such as -100, are not supported."
        raise ConfigError(
            f"the range of token ids is {int(low)} to {int(high)}; expected {expected}"
        )


def documents_of(tokens: Tensor, trainer: L.Trainer | None) -> Tensor:
    """Return the documents of a `TokenDataModule`'s tokens, to which attention is restricted.

    Raises:
        ConfigError: the data do not come from a `TokenDataModule`
    """
    data = None if trainer is None else data_of(trainer)
    if data is None:
        expected = "a TokenDataModule, which has the documents. Set mask_documents=False."
        raise ConfigError(f"mask_documents is True; expected {expected}")
    return document_ids(tokens, data.manifest.eot)
