"""Corpora: text, tokenizer and litdata shards, described by a manifest."""

from lightning_sv.corpus.config import CorpusConfig
from lightning_sv.corpus.manifest import Manifest
from lightning_sv.corpus.prepare import prepare
from lightning_sv.corpus.remote import is_remote, local_folder
from lightning_sv.corpus.sampler import Epochs, RankShare, TokenLoader
from lightning_sv.corpus.shards import Sequences, open_split
from lightning_sv.corpus.tokenizer import Tokenizer
from lightning_sv.corpus.validate import check_corpus

__all__ = [
    "CorpusConfig",
    "Epochs",
    "Manifest",
    "RankShare",
    "Sequences",
    "TokenLoader",
    "Tokenizer",
    "check_corpus",
    "is_remote",
    "local_folder",
    "open_split",
    "prepare",
]
