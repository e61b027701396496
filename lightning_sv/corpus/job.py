"""The folder of an unfinished preparation: its plan, its tokenizer and its parts.

`NAME.parts` is next to the corpus NAME. It has `job.json`, the tokenizer, a folder per complete
part, and the shards of the corpus until they are all written and renamed to NAME.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple, dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from lightning_sv.atomic import read_json, remove, write_atomically
from lightning_sv.corpus.config import CorpusConfig
from lightning_sv.corpus.parts import PART_VERSION, Part, grouped
from lightning_sv.corpus.progress import phase
from lightning_sv.corpus.sources.document import Slice, Source
from lightning_sv.corpus.sources.kinds import SOURCES, read_slices
from lightning_sv.corpus.sources.split import SplitDocuments
from lightning_sv.corpus.tokenizer import END_OF_TEXT, Tokenizer, bpe_size, open_tokenizer
from lightning_sv.errors import ConfigError

log = logging.getLogger(__name__)

FILENAME = "job.json"
# More text hardly changes a byte-level BPE, and training keeps its words in memory.
BPE_SAMPLE_BYTES = 32_000_000
#: setting that the next start may change, because it decides only how many parts are encoded
CHANGEABLE = "max_tokens"


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

    def save(self) -> None:
        """Write the plan and the tokenizer; remove parts that are not in the plan.

        They are of a text that has changed since they were encoded, or of an earlier version.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self.tokenizer.save(self.folder)
        source = dict(vars(self.source))
        slices = source.pop("slices")
        plan = {
            "settings": self.config.settings(),
            "tokenizer_sha256": self.tokenizer.sha256,
            "eot": self.tokenizer.eot,
            "cuts": self.cuts,
            "part_bytes": self.part_bytes,
            "source": source,
            "slices": [astuple(piece) for piece in slices],
        }
        write_atomically(self.folder / FILENAME, json.dumps(plan))

        planned = {part.path for part in self.parts}
        for path in sorted(set(self.folder.glob("[0-9]*-*")) - planned):
            log.warning("%s is a part of a different text or version; it is removed", path)
            remove(path)

    @classmethod
    def load(cls, folder: Path) -> "Job":
        """Read the plan of a folder."""
        plan = read_json(folder / FILENAME, f"delete {folder}.")
        try:
            config = CorpusConfig(**plan["settings"])
            slices = [Slice(*values) for values in plan["slices"]]
            source = Source(slices, **plan["source"])
            content = (folder / Tokenizer.filename).read_bytes()
            tokenizer = Tokenizer(content, str(folder), plan["eot"])
            return cls(config, folder, source, tokenizer, plan["cuts"], plan["part_bytes"])
        except (KeyError, TypeError, FileNotFoundError) as error:
            raise ConfigError(f"{folder} is damaged ({error!r}); delete it.") from None


def parts_folder(target: Path) -> Path:
    """Return the folder of the parts of a corpus."""
    return target.with_name(f"{target.name}.parts")


def open_job(config: CorpusConfig, target: Path, part_bytes: int, *, shown: bool) -> Job:
    """Plan a preparation, or go on with the one in the folder of its parts.

    Raises:
        ConfigError: the folder has the parts of a preparation with other settings or another
            tokenizer
    """
    folder = parts_folder(target)
    given = _given_tokenizer(config)  # checked before any reading
    open_source = SOURCES[config.kind].open
    if not (folder / FILENAME).is_file():
        source = open_source(config, Source([]), part_bytes)
        return _new_job(config, folder, source, given, part_bytes, shown=shown)

    started = Job.load(folder)
    _check_settings(config, given, started)
    source = open_source(config, started.source, started.part_bytes)
    if source.slices != started.source.slices:
        log.warning("the text of %s has changed; its changed parts are encoded again", folder)
        return _new_job(config, folder, source, given, started.part_bytes, shown=shown)
    job = replace(started, config=config, source=source)
    job.save()
    return job


def _new_job(
    config: CorpusConfig,
    folder: Path,
    source: Source,
    given: Tokenizer | None,
    part_bytes: int,
    *,
    shown: bool,
) -> Job:
    """Plan a preparation, with a tokenizer that is given or trained on the text."""
    read = partial(read_slices, source.slices, config)
    try:
        documents = SplitDocuments(read, config.limit, config.val_fraction)
    except ConfigError as error:
        raise ConfigError(f"source={config.source}: {error}") from None
    tokenizer = given or _train_bpe(documents, config.tokenizer, shown)
    job = Job(config, folder, source, tokenizer, documents.cuts, part_bytes)
    job.save()
    return job


def _check_settings(config: CorpusConfig, given: Tokenizer | None, started: Job) -> None:
    """Check that a preparation was started with the same settings and tokenizer."""
    then = started.config.settings()
    hint = "Restore it, delete that folder, or use a different dir."
    for key, value in config.changed(then).items():
        if key != CHANGEABLE:
            expected = f"{then[key]}, with which {started.folder} was started"
            raise ConfigError(f"{key} is {value}; expected {expected}. {hint}")
    before = started.tokenizer
    if given is not None and (given.sha256, given.eot) != (before.sha256, before.eot):
        found = f"{config.tokenizer}, which has changed"
        expected = f"the tokenizer with which {started.folder} was started"
        raise ConfigError(f"tokenizer is {found}; expected {expected}. {hint}")


def _given_tokenizer(config: CorpusConfig) -> Tokenizer | None:
    """Return the tokenizer that the settings name; None for one that is trained on the text."""
    if bpe_size(config.tokenizer) is None:
        return open_tokenizer(config.tokenizer, config.eot)
    if config.eot not in (None, END_OF_TEXT):
        expected = f"null, because tokenizer is {config.tokenizer}, no file"
        raise ConfigError(f"eot is {config.eot!r}; expected {expected}.")
    return None


def _train_bpe(documents: SplitDocuments, spec: str, shown: bool) -> Tokenizer:
    """Train a BPE on the first training documents; validation text is not used."""
    size = bpe_size(spec)
    assert size is not None, spec
    with phase("training BPE", BPE_SAMPLE_BYTES, shown=shown) as step:
        return Tokenizer.train(_sample(documents, step), size)


def _sample(documents: SplitDocuments, step: Callable[[int], None]) -> Iterator[str]:
    """Yield the first training texts; `step` is called with the bytes of each."""
    n_bytes = 0
    for document, split in documents:
        if n_bytes >= BPE_SAMPLE_BYTES:
            return
        if split == "train":
            step(document.n_bytes)
            n_bytes += document.n_bytes
            yield document.text[:BPE_SAMPLE_BYTES]
