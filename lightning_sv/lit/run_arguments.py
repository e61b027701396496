"""The arguments of `fit`, parsed without building a Trainer: for plans and comparisons."""

import typing
import warnings
from collections.abc import Sequence
from dataclasses import make_dataclass
from functools import cache, reduce
from inspect import signature
from operator import or_
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from lightning_sv.errors import ConfigError
from lightning_sv.settings.data import DataConfig
from lightning_sv.settings.model import PretrainConfig
from lightning_sv.settings.parse import Parser, add_run, ignore_keys
from lightning_sv.settings.trainer import Plain, class_name, entries_of
from lightning_sv.settings.words import values_of


@cache
def trainer_keys() -> type:
    """Return a dataclass with the names, types and defaults of the arguments of the Trainer."""
    from lightning.pytorch import Trainer  # imported here, because it takes seconds

    hints = typing.get_type_hints(Trainer.__init__)
    keys = []
    for parameter in signature(Trainer).parameters.values():
        hint = _without_classes(hints[parameter.name])
        keys.append((parameter.name, hint, parameter.default))
    return make_dataclass("TrainerKeys", keys)


def _without_classes(hint: Any) -> Any:
    """Return a type with plain values for Lightning's classes, which are not imported."""
    if getattr(hint, "__module__", "").startswith("lightning."):
        return dict if hint.__name__ == "Strategy" else Plain
    origin = get_origin(hint)
    if origin in (None, Literal):
        return hint
    arguments = tuple(_without_classes(argument) for argument in get_args(hint))
    if origin in (Union, UnionType):
        return reduce(or_, arguments)
    return origin[arguments]


class RunArguments(NamedTuple):
    """Settings of model and data, and the keys of the trainer."""

    model: PretrainConfig
    data: DataConfig
    trainer: dict[str, Any]


def parse_run(args: list[str], *, check_corpus: bool = True) -> RunArguments:
    """Parse arguments of `fit`."""
    run = _read_run(args)
    trainer: dict[str, Any] = run.trainer.as_dict()
    if isinstance(trainer["strategy"], dict):
        trainer["strategy"] = _strategy(trainer["strategy"])
    trainer["callbacks"] = _callbacks(trainer["callbacks"], args)
    _ = run.model.plan  # refuses settings that do not fit each other
    if check_corpus:
        run.data.check(run.model.backbone.vocab_size)
    return RunArguments(run.model, run.data, trainer)


def _strategy(given: dict[str, Any]) -> dict[str, Any]:
    """Return class_path and init_args of a strategy.

    Arguments on the command line are merged into init_args here, because the class is not imported.

    Raises:
        ConfigError: there is no class_path
    """
    if "class_path" not in given:
        keys = " ".join(given)
        raise ConfigError(f"trainer.strategy is {keys} without class_path; expected a class_path.")
    arguments = dict(given.get("init_args", {}))
    for key, value in given.items():
        if key not in ("class_path", "init_args"):
            arguments[key] = value
    return {"class_path": given["class_path"], "init_args": arguments}


def _callbacks(value: Any, args: Sequence[str]) -> list[Any]:
    """Return the callbacks that the trainer's key and the command line name.

    Arguments of a callback on the command line replace it in `value`, because the class is not
    imported.
    """
    named = [entry for entry in entries_of(value) if class_name(entry)]
    added = [*values_of(args, "trainer.callbacks"), *values_of(args, "trainer.callbacks+")]
    classes = [path for path in added if path.replace(".", "").isidentifier()]
    return [*named, *classes]


def check_run(args: list[str]) -> Any:
    """Check arguments of `fit` without its corpus and checkpoint: keys, values, and the model.

    Returns:
        The settings in sections.

    Raises:
        ConfigError: an argument is unknown or has a wrong value
    """
    run = _read_run(args)
    with warnings.catch_warnings(action="ignore"):  # `fit` shows them
        _ = run.model.plan  # refuses settings that do not fit each other
    return run


def _read_run(args: list[str]) -> Any:
    """Return the settings in sections."""
    parser = run_parser()
    with warnings.catch_warnings(action="ignore"):  # `fit` shows them
        return parser.instantiate(parser.parse_args(args))


@cache
def run_parser() -> Parser:
    """Return the parser of a run; building it takes as long as parsing one."""
    parser = Parser(parser_mode="omegaconf+")
    parser.add_argument("--config", action="config")
    parser.add_argument("--seed_everything", type=bool | int, default=0)
    add_run(parser, PretrainConfig, trainer_keys())
    ignore_keys(parser)
    return parser
