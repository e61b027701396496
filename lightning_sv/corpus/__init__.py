"""Corpora: text, tokenizer and litdata shards, described by a manifest.

A preparation, in the order in which files are used:

prepare         plan, encode and publish a corpus, or return the one that exists
config          its settings
existing        a corpus that exists already: is it the one of these settings?
sources         documents from files, a hub, or installed packages, in slices; their split
tokenizer       trained on the text, or given
job             the plan: source, tokenizer, parts
parts           a part: its slices of the source, then its tokens and its documents
work            encoding of as many parts as the limit of the corpus needs, in processes
encode          the encoding of one part
selection       the documents of a corpus, without duplicates, up to its limit
assemble        from parts to a corpus: shards, manifest, and its folder
shards          litdata's format
manifest        what the corpus contains

Reading it:

validate        checks before training
remote          a copy of a corpus in an object store
sequences       the sequences of a split
sampler         the order of a run, the same for any number of devices
loader          its batches, with a position that can be resumed
"""

from lightning_sv.corpus.config import CorpusConfig
from lightning_sv.corpus.loader import Epochs, TokenLoader
from lightning_sv.corpus.manifest import Manifest
from lightning_sv.corpus.prepare import prepare
from lightning_sv.corpus.remote import is_remote, local_folder
from lightning_sv.corpus.sampler import RankShare
from lightning_sv.corpus.sequences import Sequences, open_split
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
