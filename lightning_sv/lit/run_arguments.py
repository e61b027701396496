"""The arguments of `fit`, parsed without building a Trainer, for plans, comparisons and dry runs."""

import re
import typing
import warnings
from collections.abc import Sequence
from dataclasses import make_dataclass
from functools import cache, reduce
from inspect import signature
from operator import or_
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from lightning_sv.errors import ConfigError
from lightning_sv.settings.data import DataConfig
from lightning_sv.settings.model import PretrainConfig, is_of_transformers
from lightning_sv.settings.parse import Parser, add_run, ignore_keys
from lightning_sv.settings.trainer import Plain, class_name, entries_of


@cache
def trainer_keys() -> type:
    """Return a dataclass with the arguments of `lightning.Trainer`: their names, types and defaults."""
    from lightning.pytorch import Trainer  # imported here, because it takes seconds

    hints = typing.get_type_hints(Trainer.__init__)
    parameters = signature(Trainer).parameters.values()
    keys = [(each.name, _without_classes(hints[each.name]), each.default) for each in parameters]
    return make_dataclass("TrainerKeys", keys)


def _without_classes(hint: Any) -> Any:
    """Return a type with plain values for the classes of Lightning, which would be imported and built."""
    if getattr(hint, "__module__", "").startswith("lightning."):
        return dict if hint.__name__ == "Strategy" else Plain
    origin = get_origin(hint)
    if origin in (None, Literal):
        return hint
    arguments = tuple(_without_classes(argument) for argument in get_args(hint))
    return reduce(or_, arguments) if origin in (Union, UnionType) else origin[arguments]


def parse_run(
    args: list[str], *, check_corpus: bool = True
) -> tuple[PretrainConfig, DataConfig, dict[str, Any]]:
    """Parse arguments of `fit`; return the settings of model and data, and the trainer's keys."""
    parser = run_parser()
    with warnings.catch_warnings(action="ignore"):  # `fit` shows them
        config = parser.parse_args(args)
        start = config.get("model.init_from")
        if start is not None and is_of_transformers(start):
            why = "because only fit takes its sizes from there. Set --model.init_from null."
            raise ConfigError(
                f"model.init_from is {start}, a model of transformers; expected null, {why}"
            )
        run = parser.instantiate(config)
    trainer: dict[str, Any] = run.trainer.as_dict()
    if isinstance(strategy := trainer["strategy"], dict):
        # Arguments on the command line are merged into init_args here, because the class is not
        # imported.
        other = {key: strategy.pop(key) for key in set(strategy) - {"class_path", "init_args"}}
        arguments = strategy.get("init_args", {}) | other
        if "class_path" not in strategy:
            keys = " ".join(f"init_args.{key}" for key in arguments)
            raise ConfigError(
                f"trainer.strategy has no class_path; expected one next to {keys or 'other keys'}."
            )
        strategy["init_args"] = arguments
    trainer["callbacks"] = _callbacks(trainer["callbacks"], args)
    _ = run.model.plan  # refuses settings that do not fit each other
    if check_corpus:
        run.data.check(run.model.backbone.vocab_size)
    return run.model, run.data, trainer


def _callbacks(value: Any, args: Sequence[str]) -> list[Any]:
    """Return the callbacks that the trainer's key and the command line name.

    Arguments of a callback on the command line replace it in `value`, because the class is not
    imported.
    """
    named = re.findall(r"--trainer\.callbacks\+?[= ]([\w.]+)", " ".join(args))
    return [entry for entry in entries_of(value) if class_name(entry)] + named


def check_run(args: list[str]) -> None:
    """Check arguments of `fit` without its corpus and checkpoint: keys, values, and the model.

    Raises:
        ConfigError: an argument is unknown or has a wrong value
    """
    parser = run_parser()
    with warnings.catch_warnings(action="ignore"):  # `fit` shows them
        config = parser.parse_args(args)
        start = config.get("model.init_from")
        if start is None or not is_of_transformers(
            start
        ):  # else the model has the sizes of `start`
            _ = parser.instantiate(config).model.plan


@cache
def run_parser() -> Parser:
    """Return the parser of a run; building it takes as long as parsing, and a figure's plan parses a hundred runs."""
    parser = Parser(parser_mode="omegaconf+")
    parser.add_argument("--config", action="config")
    parser.add_argument("--seed_everything", type=bool | int, default=0)
    add_run(parser, PretrainConfig, trainer_keys())
    ignore_keys(parser)
    return parser
