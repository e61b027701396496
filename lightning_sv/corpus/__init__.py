"""Corpora: text to tokens to litdata shards, with a manifest that says what they are."""

from lightning_sv.corpus.check import check_corpus
from lightning_sv.corpus.config import CorpusConfig
from lightning_sv.corpus.manifest import Manifest
from lightning_sv.corpus.order import Share, TokenLoader
from lightning_sv.corpus.prepare import prepare
from lightning_sv.corpus.shards import Sequences, iter_tokens, open_split
from lightning_sv.corpus.tokenizer import Tokenizer

__all__ = [
    "CorpusConfig",
    "Manifest",
    "Sequences",
    "Share",
    "TokenLoader",
    "Tokenizer",
    "check_corpus",
    "iter_tokens",
    "open_split",
    "prepare",
]
