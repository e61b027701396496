"""`lightning-sv prepare`: convert text to tokens and shards."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_sv.cli.names import NamedCorpus, Resolved, resolve_names
from lightning_sv.corpus import CorpusConfig, Manifest, prepare
from lightning_sv.corpus.config import byte_size
from lightning_sv.corpus.manifest import FILENAME
from lightning_sv.corpus.parts import PART_BYTES
from lightning_sv.corpus.prepare import usable_cores
from lightning_sv.corpus.sources.files import counted
from lightning_sv.errors import ConfigError
from lightning_sv.json_text import json_text
from lightning_sv.settings.data import DataConfig
from lightning_sv.settings.parse import Parser, ignore_keys
from lightning_sv.settings.words import underscored

_USAGE = """lightning-sv prepare --data NAME|FILE|FOLDER [--KEY VALUE ...]
       lightning-sv prepare [--config FILE ...] [--KEY VALUE ...]"""


def run(argv: list[str]) -> int:
    """Parse the arguments, write the corpus, print its content; return the exit code."""
    config, corpus = _parse(resolve_names(underscored(argv)).to_prepare)
    existed = (Path(corpus.dir).expanduser() / FILENAME).is_file()
    part_bytes = byte_size("--part_bytes", config.part_bytes)
    workers = usable_cores() if config.workers is None else config.workers
    manifest = prepare(corpus, progress=not config.json, workers=workers, part_bytes=part_bytes)
    if config.json:
        print(json_text({"dir": config.data.corpus.dir, **manifest.to_dict()}))
    else:
        print("\n".join(_lines(config.data.corpus.dir, manifest, existed)))
    return 0


def prepare_named(corpus: NamedCorpus | None) -> None:
    """Prepare the corpus that `--data` names, and describe a new one on stderr."""
    if corpus is None:
        return
    _, config = _parse(corpus.prepare)
    if corpus.is_prepared:
        # it may have been given to `prepare` alone
        max_tokens = Manifest.load(corpus.folder).settings.get("max_tokens")
        prepare(replace(config, max_tokens=max_tokens))
    else:
        _prepare_new(config)


def prepare_for_run(named: Resolved, checked_data: Callable[[list[str]], DataConfig]) -> None:
    """Prepare the corpus of `--data`, if it is new after a check of the other words.

    Preparation may take minutes, which a wrong word would waste. With `--data.corpus.dir` a run
    reads a copy that exists elsewhere.

    Args:
        named: command line
        checked_data: checks the words of the command without a corpus; returns their data

    Raises:
        ConfigError: a wrong word, or a different folder for the corpus of your own text
    """
    if named.corpus is None or named.corpus.is_prepared:
        prepare_named(named.corpus)
        return
    data = checked_data(named.parseable)
    folder = named.corpus.folder
    if Path(data.corpus.dir).expanduser().resolve() == folder.resolve():
        _prepare_new(data.corpus)
    elif named.corpus.is_own:
        expected = f"{folder}, that of the text of --data. Remove one of them."
        raise ConfigError(f"data.corpus.dir is {data.corpus.dir}; expected {expected}")


def _prepare_new(config: CorpusConfig) -> None:
    manifest = prepare(config, workers=usable_cores())
    print("\n".join(_lines(config.dir, manifest, existed=False)), file=sys.stderr)


def _parse(words: Sequence[str]) -> tuple[Any, CorpusConfig]:
    """Return the options of `prepare` and the settings of the corpus."""
    parser = Parser(
        prog="lightning-sv prepare",
        usage=_USAGE,
        description="Convert text to token shards. `lightning-sv presets` lists the names of "
        "corpora; your own text becomes the corpus data/NAME.",
        parser_mode="omegaconf+",
    )
    parser.add_argument("--config", action="config", help="YAML with data.corpus; repeatable.")
    parser.add_class_arguments(CorpusConfig, "data.corpus")
    parser.add_argument(
        "--workers",
        type=int | None,
        default=None,
        help="Processes on this machine; null for one per core.",
    )
    parser.add_argument(
        "--part_bytes",
        default=f"{PART_BYTES >> 20}MB",
        help="Text of a part, of which a killed process loses one.",
    )
    parser.add_argument("--json", action="store_true", help="Print the manifest as JSON.")
    ignore_keys(parser, sections=["model"])  # in corpus.yaml
    config = parser.parse_args(words)
    return config, parser.instantiate(config).data.corpus


def _lines(dir: str, manifest: Manifest, existed: bool) -> Iterator[str]:
    """Yield lines about the content of a corpus, and about omitted text."""
    train = manifest.train
    val = manifest.val
    name = f"{dir} is already prepared" if existed else dir
    tokens = f"{train.tokens:,} training and {val.tokens:,} validation tokens"
    documents = f"{train.documents:,} and {_count(val.documents, 'document')}"
    if manifest.duplicates:
        documents += f" ({_count(manifest.duplicates, 'duplicate')} dropped)"
    identity = f"tokenizer {manifest.tokenizer}, corpus {manifest.corpus_hash[:12]}"
    yield f"{name}: {tokens} of {documents}, {identity}"

    left_out = counted(manifest.left_out)
    if left_out:
        yield f"  left out: {left_out}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
