"""The arguments of `fit`, parsed without building a Trainer: for plans and comparisons."""

import warnings
from functools import cache
from typing import Any, NamedTuple

from lightning_sv.settings.data import DataConfig
from lightning_sv.settings.model import PretrainConfig
from lightning_sv.settings.parse import Parser, add_run, ignore_keys
from lightning_sv.settings.trainer import check_trainer_keys


class RunArguments(NamedTuple):
    """Settings of model and data, and the keys of the trainer, whose classes are not built."""

    model: PretrainConfig
    data: DataConfig
    trainer: dict[str, Any]


def parse_run(args: list[str], *, check_corpus: bool = True) -> RunArguments:
    """Parse arguments of `fit`."""
    run = _read_run(args)
    _ = run.model.plan  # refuses settings that do not fit each other
    if check_corpus:
        run.data.check(run.model.backbone.vocab_size)
    return run


def check_run(args: list[str]) -> RunArguments:
    """Check arguments of `fit` without its corpus and checkpoint: keys, values, and the model.

    Raises:
        ConfigError: an argument is unknown or has a wrong value
    """
    with warnings.catch_warnings(action="ignore"):  # `fit` shows them
        run = parse_run(args, check_corpus=False)
    check_trainer_keys(run.trainer)
    return run


def _read_run(args: list[str]) -> RunArguments:
    parser = run_parser()
    with warnings.catch_warnings(action="ignore"):  # `fit` shows them
        config = parser.parse_args(args)
        trainer = config.pop("trainer").as_dict()
        built = parser.instantiate(config)
    return RunArguments(built.model, built.data, trainer)


@cache
def run_parser() -> Parser:
    """Return the parser of a run; building it takes as long as parsing one."""
    from lightning.pytorch import Trainer  # imported here, because it takes seconds

    parser = Parser(parser_mode="omegaconf+")
    parser.add_argument("--config", action="config")
    parser.add_argument("--seed_everything", type=bool | int, default=0)
    add_run(parser, PretrainConfig, Trainer)
    ignore_keys(parser)
    return parser
