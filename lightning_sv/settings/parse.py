"""The arguments of `fit` without a `fit`: for plans and comparisons, and without Lightning."""

from functools import cache
from typing import Any

from lightning_sv.settings.data import Batches
from lightning_sv.settings.model import Pretraining, is_of_transformers
from lightning_sv.settings.parser import Parser
from lightning_sv.settings.sections import read_past
from lightning_sv.settings.trainer import TRAINER_DEFAULTS, TrainerKeys


def parse_run(args: list[str], *, check_corpus: bool = True) -> tuple[Pretraining, Batches, dict[str, Any]]:
    """Read the arguments of a `fit`; return what it trains, what it reads, and the trainer's keys.

    Args:
        args: as on the command line
        check_corpus: whether the corpus must be there

    Raises:
        ValueError: whatever `fit` would refuse about model and data; or weights to begin with, which only `fit` reads
    """
    parser = _parser()
    config = parser.parse_args(args)
    start = config.get("from_hf") or config.get("model.init_from")
    if start is not None and (config.get("from_hf") or is_of_transformers(start)):
        raise ValueError(
            f"model.init_from {start}, a model of transformers, is for fit alone: what is planned or compared has "
            "sizes of its own; set --model.init_from null."
        )
    trainer: dict[str, Any] = config.pop("trainer").as_dict()  # not built
    made = parser.instantiate(config)
    model: Pretraining = made.model
    data: Batches = made.data
    if check_corpus:
        data.check(model.config.vocab_size)
    return model, data, trainer


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
