"""`lightning-sv params`: parameters of a model by role."""

from dataclasses import fields

from rich.console import Console

from lightning_sv.cli.names import resolve_names
from lightning_sv.json_text import json_text
from lightning_sv.nn import BackboneConfig
from lightning_sv.optim import OptimConfig
from lightning_sv.plan.parameters import count_parameters
from lightning_sv.scale import ScaleOptions
from lightning_sv.settings.model import PretrainConfig
from lightning_sv.settings.parse import Parser, ignore_keys
from lightning_sv.settings.words import underscored

#: keys of `model` that determine its parameters and their decay; the others are ignored
MODEL_KEYS = {"backbone", "scale", "scale_options", "optim"}

_USAGE = """lightning-sv params --model NAME [--scale STRATEGY] [--KEY VALUE ...]
       lightning-sv params --config FILE [--config FILE ...] [--KEY VALUE ...]"""


def run(argv: list[str]) -> int:
    """Parse the arguments, count and print the parameters; return the exit code."""
    parser = Parser(
        prog="lightning-sv params",
        usage=_USAGE,
        description="Count parameters by role. `lightning-sv presets` lists the names of models.",
        parser_mode="omegaconf+",
    )
    parser.add_argument("--config", action="config", help="YAML of a model or a run; repeatable.")
    parser.add_class_arguments(BackboneConfig, "model.backbone")
    parser.add_argument("--model.scale", type=str, default="llama", help="Scale-vector strategy.")
    parser.add_class_arguments(ScaleOptions, "model.scale_options")
    parser.add_class_arguments(OptimConfig, "model.optim")
    parser.add_argument(
        "--json", nargs="?", type=bool, const=True, default=False, help="Print the numbers as JSON."
    )
    others = [
        f"model.{field.name}" for field in fields(PretrainConfig) if field.name not in MODEL_KEYS
    ]
    ignore_keys(parser, sections=["data", "trainer"], keys=["seed_everything", *others])
    config = parser.parse_args(resolve_names(underscored(argv)).parseable)
    model = parser.instantiate(config).model
    count = count_parameters(model.backbone, config.model.scale, model.scale_options, model.optim)
    if config.json:
        print(json_text(count.to_dict()))
    else:
        count.print(Console())
    return 0
