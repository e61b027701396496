"""`lightning-sv prepare`: text to tokens to shards."""

import json

from lightning_sv.corpus import CorpusConfig, prepare
from lightning_sv.settings.parser import Parser
from lightning_sv.settings.sections import read_past


def run(argv: list[str]) -> int:
    """Parse the arguments of `prepare`, write the corpus, say what it holds; return the exit code."""
    parser = Parser(prog="lightning-sv prepare", description="Text to tokens to shards.", parser_mode="omegaconf+")
    parser.add_argument("--config", action="config", help="YAML with data.corpus; repeatable.")
    parser.add_class_arguments(CorpusConfig, "data.corpus")
    parser.add_argument("--json", action="store_true", help="Print the manifest as JSON.")
    read_past(parser, sections=["model"])  # of a corpus's own layer
    config = parser.parse_args(argv)
    manifest = prepare(parser.instantiate(config).data.corpus, progress=not config.json)
    train, val = manifest.train, manifest.val
    if config.json:
        print(json.dumps({"dir": config.data.corpus.dir, **manifest.to_dict()}, indent=2))
    else:
        print(
            f"{config.data.corpus.dir}: {train.tokens:,} training and {val.tokens:,} validation tokens of "
            f"{train.documents + val.documents:,} documents ({manifest.duplicates:,} duplicates dropped), "
            f"tokenizer {manifest.tokenizer}, corpus {manifest.corpus_hash[:12]}"
        )
    return 0
