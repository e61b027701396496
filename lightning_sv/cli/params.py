"""`lightning-sv params`: parameters of a model by role."""

import json

from rich.console import Console

from lightning_sv.nn import BackboneConfig
from lightning_sv.plan.parameters import count_parameters
from lightning_sv.scale import ScaleOptions
from lightning_sv.settings.parser import Parser
from lightning_sv.settings.sections import read_past

#: keys of `model` that say how it is trained, not what it is
TRAINING_KEYS = (
    "tokens_per_param", "mask_documents", "compile", "activation_checkpointing", "residual", "kernels", "nonfinite",
    "seed", "init_from",
)  # fmt: skip


def run(argv: list[str]) -> int:
    """Parse the arguments of `params`, count, show the ledger; return the exit code."""
    parser = Parser(prog="lightning-sv params", description="Parameters by role.", parser_mode="omegaconf+")
    parser.add_argument("--config", action="config", help="YAML of a model or of a run; repeatable.")
    parser.add_class_arguments(BackboneConfig, "model.backbone")
    parser.add_argument("--model.scale", type=str, default="llama", help="Scale-vector strategy.")
    parser.add_class_arguments(ScaleOptions, "model.scale_options")
    parser.add_argument("--json", nargs="?", type=bool, const=True, default=False, help="Print JSON.")
    keys = ["seed_everything", *(f"model.{key}" for key in TRAINING_KEYS)]
    read_past(parser, sections=["data", "trainer", "model.optim", "model.schedule"], keys=keys)
    config = parser.parse_args(argv)
    made = parser.instantiate(config)
    book = count_parameters(made.model.backbone, config.model.scale, made.model.scale_options)
    if config.json:
        print(json.dumps(book.to_dict(), indent=2))
    else:
        book.print(Console())
    return 0
