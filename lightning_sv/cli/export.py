"""`lightning-sv export`: write a run as a folder for transformers and inference engines."""

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from lightning_sv.corpus import Manifest
from lightning_sv.errors import ConfigError
from lightning_sv.interop.fold import foldable
from lightning_sv.interop.hf.card import model_card
from lightning_sv.interop.hf.save import check_unused, export
from lightning_sv.json_text import json_text
from lightning_sv.nn import Backbone
from lightning_sv.roles.fake import transformers
from lightning_sv.runs.checkpoint import load_trained
from lightning_sv.runs.directory import config_value, run_of
from lightning_sv.runs.events import Run, read_run
from lightning_sv.runs.tags import VAL_LOSS
from lightning_sv.settings.plain_parser import PlainParser


def run(argv: list[str]) -> int:
    """Parse the arguments, write and check the folder, print a summary; return the exit code."""
    text = "Write a trained model for transformers, and compare its logits with the run's."
    parser = PlainParser("export", text, json="Print the summary as JSON.")
    parser.add_argument("run", type=Path, help="Run directory, or a checkpoint in one.")
    parser.add_argument("dir", type=Path, help="New or empty folder of the export.")
    parser.add_argument("--to", choices=["hf"], default="hf", help="Format of the export.")
    parser.add_trust("the run")
    options = parser.parse_args(argv)
    check_unused(options.dir)
    quiet = transformers().utils.logging
    quiet.disable_progress_bar()
    quiet.set_verbosity_error()
    run_dir = run_of(options.run)  # None unless a checkpoint is given
    trained = read_run(run_dir or options.run, complete=False)
    model, tokenizer = load_trained(options.run, options.trust_module)
    name = f"{model.config.name}, {trained.label}"
    end = tokenizer.decode([tokenizer.eot])
    masked = trained.mask_documents
    state = _results(trained) if run_dir is None else {"checkpoint": options.run.name}
    facts = _facts(trained, model) | state
    card = partial(model_card, name, end, facts, foldable(model), masked)
    done = export(model, tokenizer, options.dir, context=trained.seq_len, card=card, masked=masked)
    if options.json:
        print(json_text({"dir": str(options.dir), **done._asdict()}, indent=None))
        return 0
    code = "plain transformers"
    if done.own_code:
        code = "with its own code, which loads with trust_remote_code=True"
    difference = f"its logits differ from the run's by {done.difference:.1g} of their norm"
    print(f"{options.dir}: {done.kind}, {code}; {difference}")
    return 0


def _facts(trained: Run, model: Backbone) -> dict[str, object]:
    """Return the rows of a run, whichever of its checkpoints is exported."""
    summary = trained.summary
    config = trained.config
    optimizer = config_value(config, "model.optim.name")
    rate = summary.get("lr")
    if summary and rate is None:  # a subclass has its own optimizer
        optimizer = None
    return {
        "scale vectors": trained.label,
        "parameters as trained": sum(p.numel() for p in model.parameters()),
        "initialized from": _start_of(config),
        **_text(config_value(config, "data.corpus.dir"), summary),
        "context": trained.seq_len,
        "optimizer": optimizer,
        "peak learning rate": None if rate is None else f"{rate:g}",
        "seed": summary.get("seed"),
        "commit": summary.get("commit"),
        "date": summary.get("date"),
    }


def _results(trained: Run) -> dict[str, object]:
    """Return the rows of the end of a run, which are those of its last checkpoint."""
    summary = trained.summary
    results = dict(summary)  # none if the run was stopped
    if VAL_LOSS in trained.curves:
        results = {"tokens": trained.tokens, "val_loss": trained.val_loss, **summary}
    return {
        "training tokens": results.get("tokens"),
        "complete": None if summary else "no: the run was stopped before its last step",
        "validation loss, nats per token": results.get("val_loss"),
        "perplexity": summary.get("val_perplexity"),
        "bits per byte": summary.get("val_bits_per_byte"),
    }


def _start_of(config: Mapping[str, Any]) -> str:
    """Return what the run was initialized from, by the name of a run, a file or a folder."""
    init_from = config_value(config, "model.init_from")
    if init_from is None:
        return "random weights"
    path = Path(str(init_from))
    return (run_of(path) or path).name


def without_folders(source: str) -> str:
    """Return a source or tokenizer with names instead of paths, which may name their owner.

    >>> without_folders("files:/home/ann/a.txt,~/texts")
    'files:a.txt,texts'
    >>> without_folders("hf:org/name"), without_folders("bpe:1024")
    ('hf:org/name', 'bpe:1024')
    """
    kind, colon, rest = source.rpartition(":")
    on_hub = kind == "hf" and not rest.startswith(("/", "~", "."))
    if on_hub:
        return source
    names = [Path(path).name or path for path in rest.split(",")]
    return f"{kind}{colon}{','.join(names)}"


def _text(folder: Any, summary: Mapping[str, Any]) -> dict[str, object]:
    """Return the rows about the text; the corpus at its path may have changed since the run."""
    identity = summary.get("corpus_hash")
    with suppress(ConfigError):
        manifest = Manifest.load(str(folder))
        if identity in (None, manifest.corpus_hash):
            licence = manifest.licence or "not stated"
            source = without_folders(manifest.source)
            tokenizer = without_folders(manifest.tokenizer)
            return {"text": source, "licence of the text": licence, "tokenizer": tokenizer}
    return {"text": identity and f"corpus {identity[:12]}, which does not exist here any more"}
