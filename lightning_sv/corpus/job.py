"""The plan of a preparation: source, tokenizer, and the parts to encode.

The parts are in `NAME.parts` next to the corpus NAME. A start plans anew and finds those of earlier
starts by their names, which have a hash of all that determines their content.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from lightning_sv.corpus.config import CorpusConfig
from lightning_sv.corpus.parts import PART_VERSION, Part, grouped
from lightning_sv.corpus.progress import phase
from lightning_sv.corpus.sources.document import Source
from lightning_sv.corpus.sources.kinds import SOURCES, read_slices
from lightning_sv.corpus.sources.split import needs_cuts, split_document, unique
from lightning_sv.corpus.tokenizer import END_OF_TEXT, Tokenizer, bpe_size, open_tokenizer
from lightning_sv.errors import ConfigError

# More text hardly changes a byte-level BPE, and training keeps its words in memory.
BPE_SAMPLE_BYTES = 32_000_000


@dataclass(frozen=True)
class Job:
    """A planned preparation.

    Attributes:
        config: settings of the corpus
        folder: folder of the parts
        source: slices of the text
        tokenizer: tokenizer of the corpus
        cuts: if True, each document is cut, with its end in validation
        part_bytes: bytes of text of a part
    """

    config: CorpusConfig
    folder: Path
    source: Source
    tokenizer: Tokenizer
    cuts: bool
    part_bytes: int

    @cached_property
    def parts(self) -> list[Part]:
        """All parts in order, of consecutive slices with about `part_bytes` of text each."""
        token = [self.tokenizer.sha256, self.tokenizer.eot]
        settings = [self.config.val_fraction, self.cuts, self.config.text_field]
        groups = grouped(self.source.slices, lambda piece: piece.n_bytes, self.part_bytes)
        parts = []
        for number, slices in enumerate(groups):
            pieces = [asdict(piece) for piece in slices]
            content = [PART_VERSION, *token, *settings, pieces]
            key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]
            parts.append(Part(self.folder / f"{number:05}-{key}", slices))
        return parts


def parts_folder(target: Path) -> Path:
    """Return the folder of the parts of a corpus."""
    return target.with_name(f"{target.name}.parts")


def plan_job(config: CorpusConfig, target: Path, part_bytes: int, *, shown: bool) -> Job:
    """Plan a preparation, with a tokenizer that is given or trained on the text."""
    tokenizer = _given_tokenizer(config)  # checked before any reading
    source = SOURCES[config.kind].open(config, part_bytes)
    documents = unique(read_slices(source.slices, config), config.limit)
    try:
        cuts = needs_cuts(documents, config.val_fraction)
    except ConfigError as error:
        raise ConfigError(f"source={config.source}: {error}") from None
    if tokenizer is None:
        tokenizer = _train_bpe(config, source, cuts, shown)
    return Job(config, parts_folder(target), source, tokenizer, cuts, part_bytes)


def _given_tokenizer(config: CorpusConfig) -> Tokenizer | None:
    """Return the tokenizer that the settings name; None for one that is trained on the text."""
    if bpe_size(config.tokenizer) is None:
        return open_tokenizer(config.tokenizer, config.eot)
    if config.eot not in (None, END_OF_TEXT):
        expected = f"null, because tokenizer is {config.tokenizer}, no file"
        raise ConfigError(f"eot is {config.eot!r}; expected {expected}.")
    return None


def _train_bpe(config: CorpusConfig, source: Source, cuts: bool, shown: bool) -> Tokenizer:
    """Train a BPE on the first training documents; validation text is not used."""
    size = bpe_size(config.tokenizer)
    assert size is not None, config.tokenizer
    with phase("training BPE", BPE_SAMPLE_BYTES, shown=shown) as step:
        return Tokenizer.train(_sample(config, source, cuts, step), size)


def _sample(
    config: CorpusConfig, source: Source, cuts: bool, step: Callable[[int], None]
) -> Iterator[str]:
    """Yield the first training texts; `step` is called with the bytes of each."""
    n_bytes = 0
    for document in unique(read_slices(source.slices, config), config.limit):
        for piece, split in split_document(document, config.val_fraction, cuts=cuts):
            if n_bytes >= BPE_SAMPLE_BYTES:
                return
            if split == "train":
                step(piece.n_bytes)
                n_bytes += piece.n_bytes
                yield piece.text[:BPE_SAMPLE_BYTES]
