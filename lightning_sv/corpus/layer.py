"""What a run must be told of a prepared corpus, as a layer of its config: `--config data/mine/corpus.yaml`."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lightning_sv.corpus.config import CorpusConfig
from lightning_sv.corpus.manifest import Manifest

FILENAME = "corpus.yaml"
#: a vocabulary is padded to a multiple of this, as GPT-2's 50,257 to 50,304: matrices of odd widths are slow
PADDED_TO = 64


def write_layer(config: CorpusConfig, manifest: Manifest, folder: Path) -> None:
    """Write corpus.yaml: what makes this corpus again, and the vocabulary of a model that reads it.

    Args:
        config: what it was made of
        manifest: what came of that
        folder: where its files are
    """
    always = ("dir", "source", "tokenizer")
    default = asdict(CorpusConfig())
    made = {key: value for key, value in asdict(config).items() if key in always or value != default[key]}
    made.pop("workers", None)  # of one preparation
    vocab_size = -(-manifest.vocab_size // PADDED_TO) * PADDED_TO
    layer: dict[str, Any] = {"data": {"corpus": made}, "model": {"backbone": {"vocab_size": vocab_size}}}
    OmegaConf.save(OmegaConf.create(layer), folder / FILENAME)
