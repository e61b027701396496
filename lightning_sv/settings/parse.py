"""A config becomes a run: the sections of `fit`, and its arguments read for plans and comparisons without Lightning."""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

from jsonargparse import ArgumentParser

from lightning_sv.errors import ConfigError
from lightning_sv.settings.data import DataConfig
from lightning_sv.settings.model import PretrainConfig, is_of_transformers
from lightning_sv.settings.parser import Parser
from lightning_sv.settings.sections import ignore_keys
from lightning_sv.settings.trainer import TRAINER_DEFAULTS, trainer_keys


def add_run(parser: ArgumentParser, model: type, trainer: Callable[..., Any]) -> None:
    """Add the sections `trainer`, which is not built, `model` and `data`."""
    parser.add_class_arguments(trainer, "trainer", fail_untyped=False, instantiate=False, sub_configs=True)
    parser.set_defaults({f"trainer.{key}": value for key, value in TRAINER_DEFAULTS.items()})
    parser.add_class_arguments(model, "model", skip={"lr"})  # model.optim.lr
    parser.add_class_arguments(DataConfig, "data")


def parse_run(args: list[str], *, check_corpus: bool = True) -> tuple[PretrainConfig, DataConfig, dict[str, Any]]:
    """Read the arguments of a `fit`; return what it trains, what it reads, and the trainer's keys.

    Raises:
        ConfigError: whatever `fit` would refuse about model and data; or weights to begin with, which only `fit` reads
    """
    parser = _parser()
    with warnings.catch_warnings(action="ignore"):  # `fit` says them
        config = parser.parse_args(args)
        start = config.get("model.init_from")
        if start is not None and is_of_transformers(start):
            raise ConfigError(
                f"model.init_from {start}, a model of transformers, is supported by fit only, because plans and "
                "comparisons set the sizes themselves; set --model.init_from null."
            )
        made = parser.instantiate(config)
    trainer: dict[str, Any] = made.trainer.as_dict()
    if isinstance(strategy := trainer["strategy"], dict):
        # arguments on the command line are merged into init_args here, because the class is not imported
        within = {key: strategy.pop(key) for key in set(strategy) - {"class_path", "init_args"}}
        arguments = strategy.get("init_args", {}) | within
        if "class_path" not in strategy:
            keys = " ".join(f"init_args.{key}" for key in arguments)
            raise ConfigError(f"trainer.strategy has no class_path; expected one next to {keys or 'other keys'}.")
        strategy["init_args"] = arguments
    if check_corpus:
        made.data.check(made.model.backbone.vocab_size)
    return made.model, made.data, trainer


@cache
def _parser() -> Parser:
    """The parser of a run; a figure's plan reads a hundred of them, and making it takes as long as reading one."""
    parser = Parser(parser_mode="omegaconf+")
    parser.add_argument("--config", action="config")
    parser.add_argument("--seed_everything", type=bool | int, default=0)
    add_run(parser, PretrainConfig, trainer_keys())
    ignore_keys(parser)
    return parser
