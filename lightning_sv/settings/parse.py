"""The arguments of `fit` without a `fit`: for plans and comparisons, and without Lightning."""

import warnings
from functools import cache
from typing import Any

import yaml

from lightning_sv.errors import ConfigError
from lightning_sv.settings.data import Batches
from lightning_sv.settings.model import Pretraining, is_of_transformers
from lightning_sv.settings.parser import Parser
from lightning_sv.settings.sections import read_past
from lightning_sv.settings.trainer import TRAINER_DEFAULTS, TrainerKeys

_STRATEGY = "trainer.strategy.init_args."


def parse_run(args: list[str], *, check_corpus: bool = True) -> tuple[Pretraining, Batches, dict[str, Any]]:
    """Read the arguments of a `fit`; return what it trains, what it reads, and the trainer's keys.

    Args:
        args: as on the command line
        check_corpus: whether the corpus must be there

    Raises:
        ConfigError: whatever `fit` would refuse about model and data; or weights to begin with, which only `fit` reads
    """
    parser = _parser()
    args, within = _within_strategy(args)
    with warnings.catch_warnings(action="ignore"):  # `fit` says them
        config = parser.parse_args(args)
    start = config.get("model.init_from")
    if start is not None and is_of_transformers(start):
        raise ConfigError(
            f"model.init_from {start}, a model of transformers, is for fit alone: what is planned or compared has "
            "sizes of its own; set --model.init_from null."
        )
    trainer: dict[str, Any] = config.pop("trainer").as_dict()  # not built
    for key, value in within.items():
        if not isinstance(trainer["strategy"], dict):
            raise ConfigError(f"--{_STRATEGY}{key} is for a class, and trainer.strategy is {trainer['strategy']!r}.")
        trainer["strategy"].setdefault("init_args", {})[key] = value
    with warnings.catch_warnings(action="ignore"):
        made = parser.instantiate(config)
    model: Pretraining = made.model
    data: Batches = made.data
    if check_corpus:
        data.check(model.config.vocab_size)
    return model, data, trainer


def _within_strategy(args: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Words without the arguments of the strategy's class, and these: here it has no type to look for them in."""
    words, within, left = [], {}, iter(args)
    for word in left:
        name, equals, value = word.partition("=")
        key = name.removeprefix("--").replace("-", "_")
        if key.startswith(_STRATEGY):
            within[key.removeprefix(_STRATEGY)] = yaml.safe_load(value if equals else next(left, ""))
        else:
            words.append(word)
    return words, within


@cache
def _parser() -> Parser:
    """The parser of a run; a figure's plan reads a hundred of them, and making it takes as long as reading one."""
    parser = Parser(parser_mode="omegaconf+")
    parser.add_argument("--config", action="config")
    parser.add_argument("--seed_everything", type=bool | int, default=0)
    parser.add_class_arguments(Pretraining, "model")
    parser.add_class_arguments(Batches, "data")
    parser.add_class_arguments(TrainerKeys, "trainer")
    parser.set_defaults({f"trainer.{key}": value for key, value in TRAINER_DEFAULTS.items()})
    read_past(parser)
    return parser
