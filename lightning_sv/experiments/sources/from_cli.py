"""Figures of one panel from strategies on the command line."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

from lightning_sv.errors import ConfigError, expect
from lightning_sv.experiments.arms import PlannedArm
from lightning_sv.experiments.claims.pooling import CORPUS_KEYS
from lightning_sv.experiments.comparability import VALIDATION_KEYS, check_same_data
from lightning_sv.experiments.kinds.base import PlannedPanel
from lightning_sv.experiments.kinds.grid import TUNING_SEED, grid_arm, grid_points
from lightning_sv.experiments.panel_checks import check_axes
from lightning_sv.experiments.plan import check_arms
from lightning_sv.experiments.results import PlannedFigure, count_seeds
from lightning_sv.experiments.run_spec import ParsedRun, RunConfig, without_preset
from lightning_sv.experiments.spec import ArmSpec, FigureSpec, PanelSpec
from lightning_sv.plan.plan import plan_steps
from lightning_sv.scale import ScaleOptions, ScaleStrategy, expand_preset
from lightning_sv.settings.data import DataConfig
from lightning_sv.settings.overrides import keys_of_file, option_pairs, parse_overrides
from lightning_sv.settings.trainer import check_precision, check_trainer_keys
from lightning_sv.settings.words import underscored


class NamedArm(NamedTuple):
    """An arm of the command line: its name in tables and plots, its strategy and own keys."""

    label: str
    spec: ArmSpec


@dataclass(frozen=True)
class RequestedArm:
    """An arm of the command line with its parsed run.

    Attributes:
        label: name in tables and plots
        spec: strategy and own keys
        steps: optimizer steps
    """

    label: str
    spec: ArmSpec
    run: ParsedRun
    steps: int


def parse_arm(scale: str, text: str = "", label: str | None = None) -> NamedArm:
    """Parse a strategy and its own arguments of `fit`; its default label is `unified,lr=0.01`."""
    words, _ = expand_preset(scale, ScaleOptions())
    ScaleStrategy.parse(words)  # before the configs, which may be incomplete
    try:
        args = underscored(shlex.split(text))
    except ValueError as error:
        found = f"the arguments of {scale} are {text!r}"
        raise ConfigError(f"{found}; expected words of a shell ({error}).") from None
    files, keys = parse_overrides(args, "compare")
    overrides: dict[str, Any] = {}
    for file in files:
        overrides |= keys_of_file(file)
    overrides |= keys
    if not label:
        label = scale
        for key, value in option_pairs(args, "compare"):
            label += f",{key.rpartition('.')[2]}={value}"
    return NamedArm(label, ArmSpec(scale, overrides=overrides))


def request_arms(
    named: Sequence[NamedArm], words: Sequence[str], point: Mapping[str, Any]
) -> list[RequestedArm]:
    """Parse the run of each arm; all have the steps of the first one.

    Args:
        named: arms of the command line
        words: arguments of `fit` of all arms
        point: further keys of all arms

    Raises:
        ConfigError: arguments that `fit` refuses, or an arm with a length or a batch of its own
    """
    files, keys = parse_overrides(words, "compare")
    common = {**keys, **point}
    arms = []
    for label, spec in named:
        expanded = without_preset(spec)
        run = RunConfig(files, {**common, **expanded.overrides}, expanded.scale).parse()
        steps = plan_steps(run.model, run.data, run.trainer)
        arms.append(RequestedArm(label, spec, run, steps))
    first, *others = arms
    for arm in others:
        _check_length(arm, first)
    return [replace(arm, steps=first.steps) for arm in arms]


def checked_data(
    named: Sequence[NamedArm], words: Sequence[str], point: Mapping[str, Any]
) -> DataConfig:
    """Return the data of the first arm, after a check of all arms; no corpus is needed."""
    arms = request_arms(named, words, point)
    for arm in arms:
        check_trainer_keys(arm.run.trainer, complete=True)
    return arms[0].run.data


def _check_length(arm: RequestedArm, first: RequestedArm) -> None:
    """Refuse an arm that would train on other tokens than the first one."""
    size = arm.run.data.tokens_per_step
    size_of_first = first.run.data.tokens_per_step
    name = f"{arm.label!r}"
    expected = f"{size_of_first:,}, those of {first.label}. Set the batch for all arms."
    expect(size == size_of_first, f"tokens per step of {name}", f"{size:,}", expected)

    own = arm.spec.overrides
    for key in ("trainer.max_steps", "model.tokens_per_param"):
        expected = f"no value, because all arms have the steps of {first.label}. Remove it."
        expect(key not in own, f"{key} of {name}", own.get(key), expected)


def tokens_sentence(arms: Sequence[RequestedArm]) -> str:
    """Return a sentence about the tokens and steps of all arms."""
    first = arms[0]
    size = first.run.data.tokens_per_step
    tokens = first.steps * size
    per_param = tokens / first.run.model.plan.n_activated
    total = f"{tokens:,} tokens, {per_param:.3g} per parameter of {first.label}"
    return f"every arm trains for {total}: {first.steps:,} steps of {size:,}."


def check_data(arms: Sequence[RequestedArm]) -> None:
    """Check that the corpora of the arms exist and are one, before the first run.

    Raises:
        ConfigError: arguments that `fit` refuses, or a different corpus, tokenizer or validation
            set
    """
    facts = {}
    for arm in arms:
        data = arm.run.data
        check_trainer_keys(arm.run.trainer, complete=True)
        check_precision(arm.run.trainer["precision"])  # the runs' own warnings are in their logs
        is_first = arm is arms[0]  # other corpora are refused, and checksums take minutes
        data.check(arm.run.model.backbone.vocab_size, checksums=is_first)
        _check_devices(arm.run)
        facts[arm.label] = {key: getattr(data.manifest, key) for key in CORPUS_KEYS}
        for key in VALIDATION_KEYS:
            facts[arm.label][f"data.{key}"] = getattr(data, key)
    check_same_data(facts, "arms")


def _check_devices(run: ParsedRun) -> None:
    """Check the batch of known devices; each run checks that of others."""
    devices = run.trainer["devices"]
    nodes = run.trainer["num_nodes"]
    if isinstance(devices, int) and devices > 0 and isinstance(nodes, int):
        run.data.share(devices * nodes)
        run.data.check_validation(devices * nodes)


def compared_figure(arms: Sequence[RequestedArm], seeds: int) -> PlannedFigure:
    """Plan a figure that compares the first arm with each other one.

    Raises:
        ConfigError: two arms have one name or one configuration
    """
    first, *others = arms
    planned = []
    specs = {}
    for arm in arms:
        is_baseline = arm is first
        run_spec = replace(arm.run.spec(arm.steps), title=arm.label)
        planned.append(PlannedArm(arm.label, run_spec, tuple(range(seeds)), baseline=is_baseline))
        specs[arm.label] = replace(arm.spec, baseline=is_baseline)
    check_arms(planned)

    title = f"{', '.join(arm.label for arm in others)} against {first.label}"
    summary = f"{len(arms)} arms, {count_seeds(seeds)}."
    panel = PanelSpec("Validation loss", specs)
    spec = FigureSpec("comparison", title, summary, [panel], section="A comparison of your own")
    return PlannedFigure(spec, (PlannedPanel(panel, tuple(planned)),))


def swept_figure(
    arms: Sequence[RequestedArm], axes: Mapping[str, Sequence[float]], seeds: int
) -> PlannedFigure:
    """Plan a figure that trains each arm at all combinations of some settings.

    Raises:
        ConfigError: a value is not above 0 or repeated, or two arms are one
    """
    check_axes(axes)
    points = grid_points(axes)
    seed_range = tuple(range(TUNING_SEED, TUNING_SEED + seeds))
    planned = []
    for arm, point in product(arms, points):
        config = arm.run.config
        at_point = replace(config, keys={**config.keys, **point})
        run_spec = at_point.parse().spec(arm.steps)
        planned.append(replace(grid_arm(arm.label, point, run_spec), seeds=seed_range))
    check_arms(planned)

    labels = ", ".join(arm.label for arm in arms)
    names = " and ".join(key.rpartition(".")[2] for key in axes)
    summary = f"{len(points)} points, {count_seeds(seeds)} each."
    panel = PanelSpec(
        "Validation loss",
        {arm.label: arm.spec for arm in arms},
        kind="grid",
        axes={key: {"sweep": list(values)} for key, values in axes.items()},
    )
    title = f"{names} of {labels}"
    spec = FigureSpec("sweep", title, summary, [panel], section="A sweep of your own")
    return PlannedFigure(spec, (PlannedPanel(panel, tuple(planned)),))
