"""The arms of a comparison: what each comes to, one budget for all, and what is refused before an hour is spent."""

import math
import shlex
import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from lightning_sv.experiments.checks import CORPUS_KEYS, VALIDATION_KEYS, refuse_other_data
from lightning_sv.experiments.pair import Arm
from lightning_sv.plan import plan_steps
from lightning_sv.settings.data import Batches
from lightning_sv.settings.model import Pretraining
from lightning_sv.settings.parse import parse_run
from lightning_sv.settings.trainer import refuse_trainer_keys
from lightning_sv.settings.words import underscored


def make_arm(scale: str, text: str, label: str | None) -> Arm:
    """Make an arm; its label is the strategy and what its own arguments change."""
    args = underscored(shlex.split(text))
    words = " ".join(args).replace("=", " ").split()
    changes = [f"{key.rpartition('.')[2]}={value}" for key, value in zip(words[::2], words[1::2], strict=False)]
    return Arm(label or ",".join([scale, *changes]), scale, tuple(args))


class Resolved(NamedTuple):
    """An arm, and what `fit` would build of its arguments."""

    arm: Arm
    model: Pretraining
    data: Batches
    trainer: dict[str, Any]


def resolve(arms: Sequence[Arm], shared: list[str]) -> list[Resolved]:
    """Resolve every arm as `fit` would.

    Raises:
        ValueError: What `fit` would refuse, or arms on different corpora, tokenizers or validation sets.
    """
    runs, hashed = [], set[Path]()
    for arm in arms:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, data, trainer = parse_run([*shared, *arm.args, "--model.scale", arm.scale], check_corpus=False)
        refuse_trainer_keys(trainer)
        corpus = Path(data.corpus.dir).resolve()
        data.check(model.config.vocab_size, checksums=corpus not in hashed)  # once: at real sizes it takes minutes
        hashed.add(corpus)
        devices, nodes = trainer["devices"], trainer["num_nodes"]
        if isinstance(devices, int) and devices > 0 and isinstance(nodes, int):  # else each run finds out
            data.share(devices * nodes)
            data.check_validation(devices * nodes)
        runs.append(Resolved(arm, model, data, trainer))
    refuse_other_data(
        {
            run.arm.label: {key: getattr(run.data.manifest, key) for key in CORPUS_KEYS}
            | {f"data.{key}": getattr(run.data, key) for key in VALIDATION_KEYS}
            for run in runs
        },
        "arms",
    )
    return runs


def refuse_equal(runs: Sequence[Resolved]) -> None:
    """Refuse two strategies that are one model."""
    for a, b in combinations(runs, 2):
        if a.arm.args == b.arm.args and a.model.meaning == b.model.meaning:
            raise ValueError(
                f"strategies {a.arm.scale!r} and {b.arm.scale!r} are the same model, {str(a.model.meaning)!r}; "
                "compare two that differ."
            )


def one_budget(runs: Sequence[Resolved]) -> tuple[list[Arm], str]:
    """Give every arm the tokens of A, whose parameters decide them where no steps are set; say so in a sentence.

    Raises:
        ValueError: An arm asks for other tokens, or A's are not a whole number of its steps.
    """
    a, *_ = runs
    steps, size = plan_steps(a.model, a.data, a.trainer), a.data.tokens_per_step
    tokens, of = steps * size, f"{a.arm.label}'s {steps * size:,} tokens"
    whole = math.lcm(*(run.data.tokens_per_step for run in runs))
    settled, others = [], []
    for run in runs:
        own, given = run.data.tokens_per_step, str(run.trainer["max_steps"])
        named = {word.split("=", 1)[0] for word in run.arm.args} if run is not a else set()
        if "--trainer.max_steps" in named and given != "-1" and int(given) * own != tokens:
            raise ValueError(
                f"{run.arm.label!r} is given trainer.max_steps {given}, {int(given) * own:,} tokens: all arms train "
                f"for {of}; leave it out."
            )
        if "--model.tokens_per_param" in named and run.model.tokens_per_param != a.model.tokens_per_param:
            raise ValueError(
                f"{run.arm.label!r} is given model.tokens_per_param {run.model.tokens_per_param:g}: all arms train "
                f"for {of}; leave it out, or give it to all."
            )
        if tokens % own:
            raise ValueError(
                f"{of} are no whole number of steps of {own:,} tokens, which {run.arm.label!r} takes; set "
                f"trainer.max_steps {-(-tokens // whole) * whole // size} for all."
            )
        more = () if given == str(tokens // own) else ("--trainer.max_steps", str(tokens // own))
        settled.append(replace(run.arm, args=(*run.arm.args, *more)))
        if own != size:
            others.append(f"; {tokens // own:,} steps of {run.arm.label}")
    share = f"{tokens / a.model.n_activated:.3g} a parameter of {a.arm.label}"
    return settled, f"every arm trains for {tokens:,} tokens, {share}: {steps:,} steps of {size:,}{''.join(others)}."
