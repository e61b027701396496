"""`lightning-sv params`: parameters of a model by role."""

import json
from typing import Any

from rich.console import Console

from lightning_sv.nn import BackboneConfig
from lightning_sv.plan.parameters import ledger
from lightning_sv.scale import ScaleOptions
from lightning_sv.settings.parser import RUN_KEYS, Parser


def run(argv: list[str]) -> int:
    """Parse the arguments of `params`, count, show the ledger; return the exit code."""
    parser = Parser(prog="lightning-sv params", description="Parameters by role.", parser_mode="omegaconf+")
    parser.add_argument("--config", action="config", help="YAML of a model or of a run; repeatable.")
    parser.add_class_arguments(BackboneConfig, "model.backbone")
    parser.add_argument("--model.scale", type=str, default="llama", help="Scale-vector strategy.")
    parser.add_class_arguments(ScaleOptions, "model.scale_options")
    for key in ("optim", "schedule"):
        parser.add_argument(f"--model.{key}", type=dict, help="Not used here.")
    unused = "tokens_per_param mask_documents compile activation_checkpointing residual nonfinite seed"
    ignored = [f"model.{key}" for key in unused.split()]
    ignored += ["data", "trainer", "scalars", "branch_norms", "experts", "batch_hash", "checkpoint", "progress"]
    for key in [*ignored, "seed_everything", *(key for key in RUN_KEYS if key != "json")]:
        parser.add_argument(f"--{key}", type=Any, help="Not used here.")
    parser.add_argument("--json", nargs="?", type=bool, const=True, default=False, help="Print JSON.")
    config = parser.parse_args(argv)
    made = parser.instantiate(config)
    book = ledger(made.model.backbone, config.model.scale, made.model.scale_options)
    if config.json:
        print(json.dumps(book.to_dict(), indent=2))
    else:
        book.print(Console())
    return 0
