"""Strategies on the command line as a figure of one panel: what each comes to, one budget for all, what is refused."""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from string import ascii_lowercase
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from lightning_sv.errors import ConfigError
from lightning_sv.experiments.claims.pooling import CORPUS_KEYS
from lightning_sv.experiments.comparability import VALIDATION_KEYS, check_same_data
from lightning_sv.experiments.plan import FigurePlan, plan_figure
from lightning_sv.experiments.run_spec import RunResolver
from lightning_sv.experiments.spec import ArmSpec, Budget, FigureSpec, ModelSpec, PanelSpec
from lightning_sv.plan.plan import plan_steps
from lightning_sv.settings.cli_args import parse_overrides, read_leaves, to_args
from lightning_sv.settings.data import DataConfig
from lightning_sv.settings.model import PretrainConfig
from lightning_sv.settings.parse import parse_run
from lightning_sv.settings.plain_parser import underscored
from lightning_sv.settings.trainer import check_trainer_keys

#: an arm as it is asked for: its label, its strategy and keys
Asked = tuple[str, ArmSpec]
#: name of the budget of a command of one's own
_OWN = "compare"
_OURS = ("model.scale", "seed_everything", "run_dir", "ckpt_path")


def asked(scale: str, text: str, label: str | None) -> Asked:
    """An arm; its label is the strategy and what its own arguments change.

    Args:
        scale: strategy
        text: its own arguments, as on the command line
        label: in place of that

    Raises:
        ConfigError: arguments that are no keys of `fit`
    """
    args = underscored(shlex.split(text))
    words = " ".join(args).replace("=", " ").split()
    changes = [f"{key.rpartition('.')[2]}={value}" for key, value in zip(words[::2], words[1::2], strict=False)]
    files, keys = parse_overrides(args, "compare")
    leaves = {key: value for file in files for key, value in read_leaves(file).items()}
    return label or ",".join([scale, *changes]), ArmSpec(scale, overrides={**leaves, **keys})


def compared_figure(arms: Sequence[Asked], words: Sequence[str], seeds: int) -> FigurePlan:
    """The figure of one panel that compares the first arm with each other one, settled.

    Raises:
        ConfigError: a comparison that makes no sense, or what `fit` would refuse
    """
    _check(arms, words, seeds)
    (a, _), *others = arms
    panel = PanelSpec("Validation loss", {label: replace(arm, baseline=label == a) for label, arm in arms})
    summary = f"{len(arms)} arms, {'one seed' if seeds == 1 else f'{seeds} seeds'}."
    title = f"{', '.join(label for label, _ in others)} against {a}"
    planned = _settled(FigureSpec("comparison", title, "A comparison of your own", summary, [panel]), words, seeds)
    (settled,) = planned.panels
    named = tuple(replace(arm, run_spec=replace(arm.run_spec, title=arm.label)) for arm in settled.arms)
    return replace(planned, panels=(replace(settled, arms=named),))


def swept_figure(
    arms: Sequence[Asked], axes: Mapping[str, Sequence[float]], words: Sequence[str], seeds: int, made: PretrainConfig
) -> FigurePlan:
    """The figure of one panel that trains every arm at all combinations of some settings, settled.

    Args:
        arms: what is trained
        axes: key of `fit` -> its values
        words: of the command line, for every arm
        seeds: runs of every point
        made: what `fit` would build of the words

    Raises:
        ConfigError: a grid that is none, or what `fit` would refuse
    """
    _check_keys(arms, words, seeds)
    for key, values in axes.items():
        if not all(0 < value < math.inf for value in values) or len(set(values)) < len(values):
            raise ConfigError(f"sweep: {key} is {list(values)}; give positive numbers that differ.")
    title = f"{' and '.join(key.rpartition('.')[2] for key in axes)} of {', '.join(label for label, _ in arms)}"
    panel = PanelSpec(
        "Validation loss",
        dict(arms),
        kind="grid",
        optim=made.optim.name,
        schedule=made.schedule.name,
        axes={key: {_OWN: list(values)} for key, values in axes.items()},
    )
    points = math.prod(map(len, axes.values()))
    summary = f"{points} points, {'one seed' if seeds == 1 else f'{seeds} seeds'} each."
    return _settled(FigureSpec("sweep", title, "A sweep of your own", summary, [panel]), words, seeds)


def _settled(figure: FigureSpec, words: Sequence[str], seeds: int) -> FigurePlan:
    """A figure of one panel under what the words of a command line say."""
    files, keys = parse_overrides(words, "compare")
    (panel,) = figure.panels
    # its time is that of its steps, which nobody estimates
    model = ModelSpec(config="", seconds_per_1000_steps=0.0)
    budget = Budget(_OWN, figure.summary, layers=[], seeds=seeds, models={panel.model: model}, overrides=keys)
    return plan_figure(figure, RunResolver(budget, {}, files=files))


def _check(arms: Sequence[Asked], words: Sequence[str], seeds: int) -> None:
    """Refuse what makes no comparison."""
    labels = [label for label, _ in arms]
    if not 2 <= len(arms) <= len(ascii_lowercase):
        raise ConfigError(
            f"There are {len(arms) - 1} strategies to compare with {labels[0]!r}; give 1 to {len(ascii_lowercase) - 1}."
        )
    for (i, first), (j, second) in combinations(enumerate(labels), 2):
        if first == second:
            raise ConfigError(
                f"Arms {ascii_lowercase[i].upper()} and {ascii_lowercase[j].upper()} are both {first!r}, so "
                "their difference would be noise; give strategies that differ, or labels where the arguments do."
            )
    _check_keys(arms, words, seeds)


def _check_keys(arms: Sequence[Asked], words: Sequence[str], seeds: int) -> None:
    """Refuse keys that every run has its own of."""
    if seeds < 1:
        raise ConfigError(f"--seeds is {seeds}; give the number of seeds, at least 1.")
    given = [word.split("=", 1)[0].removeprefix("--") for word in words if word.startswith("--")]
    for key in (*given, *(key for _, arm in arms for key in arm.overrides)):
        if key in _OURS:
            raise ConfigError(
                f"every run has its own --{key}; leave it out of the arguments and name strategies, seeds and the "
                "output directory instead."
            )


def check_fixed(words: Sequence[str], options: Mapping[str, str]) -> None:
    """Refuse a key of the command line that an option of a sweep varies: one of the two would be ignored.

    Args:
        words: of the command line, for every arm
        options: varied key of `fit` -> the option that names its values

    Raises:
        ConfigError: names the key and the option
    """
    for given, value in parse_overrides(words, "sweep")[1].items():
        for key, option in options.items():
            inside = key.startswith(f"{given}.") and isinstance(value, Mapping)
            if given == key or (
                inside and OmegaConf.select(OmegaConf.create(value), key[len(given) + 1 :]) is not None
            ):
                raise ConfigError(f"--{given} is {value}, and {option} varies {key}; leave one of them out.")


class Resolved(NamedTuple):
    """An arm, and what `fit` would build of its arguments."""

    label: str
    arm: ArmSpec
    model: PretrainConfig
    data: DataConfig
    trainer: dict[str, Any]


def resolve(arms: Sequence[Asked], shared: Sequence[str]) -> list[Resolved]:
    """Resolve every arm as `fit` would.

    Raises:
        ConfigError: what `fit` would refuse, or arms on different corpora, tokenizers or validation sets
    """
    runs, hashed = [], set[Path]()
    for label, arm in arms:
        words = [*shared, *to_args(arm.overrides), "--model.scale", arm.scale]
        model, data, trainer = parse_run(words, check_corpus=False)
        check_trainer_keys(trainer)
        corpus = Path(data.corpus.dir).resolve()
        data.check(model.config.vocab_size, checksums=corpus not in hashed)  # once: at real sizes it takes minutes
        hashed.add(corpus)
        devices, nodes = trainer["devices"], trainer["num_nodes"]
        if isinstance(devices, int) and devices > 0 and isinstance(nodes, int):  # else each run finds out
            data.share(devices * nodes)
            data.check_validation(devices * nodes)
        runs.append(Resolved(label, arm, model, data, trainer))
    check_same_data(
        {
            run.label: {key: getattr(run.data.manifest, key) for key in CORPUS_KEYS}
            | {f"data.{key}": getattr(run.data, key) for key in VALIDATION_KEYS}
            for run in runs
        },
        "arms",
    )
    return runs


def check_different(runs: Sequence[Resolved]) -> None:
    """Refuse two strategies that are one model."""
    for a, b in combinations(runs, 2):
        if a.arm.overrides == b.arm.overrides and a.model.canonical == b.model.canonical:
            raise ConfigError(
                f"strategies {a.arm.scale!r} and {b.arm.scale!r} are the same model, {str(a.model.canonical)!r}; "
                "compare two that differ."
            )


def one_budget(runs: Sequence[Resolved]) -> tuple[list[Asked], str]:
    """Give every arm the tokens of A, whose parameters decide them where no steps are set; say so in a sentence.

    Raises:
        ConfigError: an arm asks for other tokens, or A's are not a whole number of its steps
    """
    a, *_ = runs
    steps, size = plan_steps(a.model, a.data, a.trainer), a.data.tokens_per_step
    tokens, of = steps * size, f"{a.label}'s {steps * size:,} tokens"
    whole = math.lcm(*(run.data.tokens_per_step for run in runs))
    settled, others = [], []
    for run in runs:
        own, given = run.data.tokens_per_step, str(run.trainer["max_steps"])
        named = run.arm.overrides if run is not a else {}
        if "trainer.max_steps" in named and given != "-1" and int(given) * own != tokens:
            raise ConfigError(
                f"{run.label!r} is given trainer.max_steps {given}, {int(given) * own:,} tokens: all arms train "
                f"for {of}; leave it out."
            )
        if "model.tokens_per_param" in named and run.model.tokens_per_param != a.model.tokens_per_param:
            raise ConfigError(
                f"{run.label!r} is given model.tokens_per_param {run.model.tokens_per_param:g}: all arms train "
                f"for {of}; leave it out, or give it to all."
            )
        if tokens % own:
            raise ConfigError(
                f"{of} are no whole number of steps of {own:,} tokens, which {run.label!r} takes; set "
                f"trainer.max_steps {-(-tokens // whole) * whole // size} for all."
            )
        more = {} if given == str(tokens // own) else {"trainer.max_steps": tokens // own}
        settled.append((run.label, replace(run.arm, overrides={**run.arm.overrides, **more})))
        if own != size:
            others.append(f"; {tokens // own:,} steps of {run.label}")
    share = f"{tokens / a.model.n_activated:.3g} a parameter of {a.label}"
    return settled, f"every arm trains for {tokens:,} tokens, {share}: {steps:,} steps of {size:,}{''.join(others)}."
