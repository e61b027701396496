"""Corpora: text to tokens to litdata shards, with a manifest that says what they are."""

from lightning_sv.corpus.config import CorpusConfig
from lightning_sv.corpus.manifest import Manifest
from lightning_sv.corpus.prepare import prepare
from lightning_sv.corpus.shards import TokenDataset, TokenLoader, iter_tokens, open_split
from lightning_sv.corpus.tokenizer import Tokenizer

__all__ = [
    "CorpusConfig",
    "Manifest",
    "TokenDataset",
    "TokenLoader",
    "Tokenizer",
    "iter_tokens",
    "open_split",
    "prepare",
]
