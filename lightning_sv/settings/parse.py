"""Arguments of `fit`: its sections, and their parser for plans and comparisons without Lightning."""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

from jsonargparse import ArgumentParser

from lightning_sv.errors import ConfigError
from lightning_sv.settings.data import DataConfig
from lightning_sv.settings.model import PretrainConfig, is_of_transformers
from lightning_sv.settings.parser import Parser, ignore_keys
from lightning_sv.settings.trainer import TRAINER_DEFAULTS, trainer_keys


def add_run(parser: ArgumentParser, model: type, trainer: Callable[..., Any]) -> None:
    """Add the sections `model`, `data` and `trainer`; the last is not instantiated."""
    parser.add_class_arguments(trainer, "trainer", fail_untyped=False, instantiate=False, sub_configs=True)
    parser.set_defaults({f"trainer.{key}": value for key, value in TRAINER_DEFAULTS.items()})
    parser.add_class_arguments(model, "model", skip={"lr"})  # model.optim.lr
    parser.add_class_arguments(DataConfig, "data")


def parse_run(args: list[str], *, check_corpus: bool = True) -> tuple[PretrainConfig, DataConfig, dict[str, Any]]:
    """Parse arguments of `fit`; return the settings of model and data, and the trainer's keys.

    Raises:
        ConfigError: `fit` would reject model or data, or they start from a model of transformers
    """
    parser = _parser()
    with warnings.catch_warnings(action="ignore"):  # `fit` shows them
        config = parser.parse_args(args)
        start = config.get("model.init_from")
        if start is not None and is_of_transformers(start):
            raise ConfigError(
                f"model.init_from is {start}, a model of transformers; expected null, because only fit takes its sizes "
                "from there. Set --model.init_from null."
            )
        run = parser.instantiate(config)
    trainer: dict[str, Any] = run.trainer.as_dict()
    if isinstance(strategy := trainer["strategy"], dict):
        # Arguments on the command line are merged into init_args here, because the class is not imported.
        other = {key: strategy.pop(key) for key in set(strategy) - {"class_path", "init_args"}}
        arguments = strategy.get("init_args", {}) | other
        if "class_path" not in strategy:
            keys = " ".join(f"init_args.{key}" for key in arguments)
            raise ConfigError(f"trainer.strategy has no class_path; expected one next to {keys or 'other keys'}.")
        strategy["init_args"] = arguments
    if check_corpus:
        run.data.check(run.model.backbone.vocab_size)
    return run.model, run.data, trainer


@cache
def _parser() -> Parser:
    """Return the parser of a run; building it takes as long as parsing, and a figure's plan parses a hundred runs."""
    parser = Parser(parser_mode="omegaconf+")
    parser.add_argument("--config", action="config")
    parser.add_argument("--seed_everything", type=bool | int, default=0)
    add_run(parser, PretrainConfig, trainer_keys())
    ignore_keys(parser)
    return parser
