"""Figures of one panel from strategies on the command line."""

import logging
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from string import ascii_lowercase

from lightning_sv.errors import ConfigError, expect
from lightning_sv.experiments.claims.pooling import CORPUS_KEYS
from lightning_sv.experiments.comparability import VALIDATION_KEYS, check_same_data
from lightning_sv.experiments.plan import plan_figure
from lightning_sv.experiments.results import PlannedFigure
from lightning_sv.experiments.run_spec import RunResolver
from lightning_sv.experiments.spec import ArmSpec, Budget, FigureSpec, ModelSpec, PanelSpec
from lightning_sv.lit.run_arguments import parse_run
from lightning_sv.plan.plan import plan_steps
from lightning_sv.scale import ScaleOptions, ScaleStrategy, expand_preset
from lightning_sv.settings.data import DataConfig
from lightning_sv.settings.model import PretrainConfig
from lightning_sv.settings.parse import config_files, dropped_entries
from lightning_sv.settings.trainer import check_trainer_keys
from lightning_sv.settings.words import underscored
from lightning_sv.settings.yaml_file import option_pairs, parse_overrides, read_leaves, to_args

log = logging.getLogger(__name__)

#: a requested arm: label, and strategy with keys
Asked = tuple[str, ArmSpec]
#: name of the budget of these figures
_BUDGET = "compare"
#: keys that differ between runs
_RESERVED = ("model.scale", "seed_everything", "run_dir", "ckpt_path")


def asked(scale: str, text: str, label: str | None) -> Asked:
    """Parse an arm; the default label is the strategy and its own arguments."""
    words, _ = expand_preset(scale, ScaleOptions())
    ScaleStrategy.parse(words)  # before the configs, which may be incomplete
    try:
        args = underscored(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"the arguments of {scale} are {text!r}; expected words of a shell ({error}).") from None
    changes = [f"{key.rpartition('.')[2]}={value}" for key, value in option_pairs(args, "compare")]
    files, keys = parse_overrides(args, "compare")
    leaves = {key: value for file in files for key, value in read_leaves(file).items()}
    return label or ",".join([scale, *changes]), ArmSpec(scale, overrides={**leaves, **keys})


def compared_figure(arms: Sequence[Asked], words: Sequence[str], seeds: int) -> PlannedFigure:
    """Plan a figure that compares the first arm with each other one."""
    labels = [label for label, _ in arms]
    if len(labels) > len(ascii_lowercase):
        raise ConfigError(f"--arms has {len(labels) - 1} strategies; expected at most {len(ascii_lowercase) - 1}.")
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(f"{label!r} is the name of two arms; expected different names. Change one of them.")
    (a, _), *others = arms
    panel = PanelSpec("Validation loss", {label: replace(arm, baseline=label == a) for label, arm in arms})
    summary = f"{len(arms)} arms, {_seeds(seeds)}."
    title = f"{', '.join(label for label, _ in others)} against {a}"
    figure = _plan(FigureSpec("comparison", title, "A comparison of your own", summary, [panel]), words, seeds)
    (planned,) = figure.panels
    named = [replace(arm, run_spec=replace(arm.run_spec, title=arm.label)) for arm in planned.arms]
    return replace(figure, panels=(replace(planned, arms=tuple(named)),))


def swept_figure(
    arms: Sequence[Asked], axes: Mapping[str, Sequence[float]], words: Sequence[str], seeds: int, made: PretrainConfig
) -> PlannedFigure:
    """Plan a figure that trains each arm at all combinations of some settings."""
    title = f"{' and '.join(key.rpartition('.')[2] for key in axes)} of {', '.join(label for label, _ in arms)}"
    grid, optim, schedule = {key: {_BUDGET: list(axes[key])} for key in axes}, made.optim.name, made.schedule.name
    panel = PanelSpec("Validation loss", dict(arms), kind="grid", optim=optim, schedule=schedule, axes=grid)
    summary = f"{math.prod(map(len, axes.values()))} points, {_seeds(seeds)} each."
    return _plan(FigureSpec("sweep", title, "A sweep of your own", summary, [panel]), words, seeds)


def _seeds(n: int) -> str:
    return "one seed" if n == 1 else f"{n} seeds"


def _plan(figure: FigureSpec, words: Sequence[str], seeds: int) -> PlannedFigure:
    files, keys = parse_overrides(words, "compare")
    (panel,) = figure.panels
    given = [word.partition("=")[0].removeprefix("--") for word in words if word.startswith("--")]
    for key in (*given, *(key for arm in panel.arms.values() for key in arm.overrides)):
        wanted = "no value, because it differs between runs. Use the command's own options."
        expect(key not in _RESERVED, f"--{key}", "set", wanted)
    model = ModelSpec(config="", seconds_per_1000_steps=0.0)  # the time is not estimated
    budget = Budget(_BUDGET, figure.summary, layers=[], seeds=seeds, models={panel.model: model}, overrides=keys)
    return plan_figure(figure, RunResolver(budget, {}, files=files))


def one_budget(arms: Sequence[Asked], shared: Sequence[str]) -> tuple[list[Asked], str, PretrainConfig, DataConfig]:
    """Resolve each arm as `fit` does, and give it the tokens of A, which by default follow from its parameters.

    Returns:
        The arms with their steps, a sentence on these, and the model and data of A.

    Raises:
        ConfigError: arguments that `fit` refuses, arms on different corpora, tokenizers or validation sets, an arm with
            different tokens, or tokens that are not a whole number of steps of an arm
    """
    made, hashed = [], set[Path]()
    for _, arm in arms:
        words = [*shared, *to_args(arm.overrides), "--model.scale", arm.scale]
        model, data, trainer = parse_run(words, check_corpus=False)
        check_trainer_keys(trainer, complete=True)
        corpus = data.folder.resolve()
        data.check(model.backbone.vocab_size, checksums=corpus not in hashed)  # a large corpus takes minutes
        hashed.add(corpus)
        devices, nodes = trainer["devices"], trainer["num_nodes"]
        if isinstance(devices, int) and devices > 0 and isinstance(nodes, int):  # otherwise each run checks it
            data.share(devices * nodes)
            data.check_validation(devices * nodes)
        made.append((model, data, trainer))
    for sentence in dropped_entries(config_files(shared), made[0][2]):
        log.warning("%s", sentence)
    facts = {
        label: {key: getattr(data.manifest, key) for key in CORPUS_KEYS}
        | {f"data.{key}": getattr(data, key) for key in VALIDATION_KEYS}
        for (label, _), (_, data, _) in zip(arms, made, strict=True)
    }
    check_same_data(facts, "arms")
    first, first_data, _ = made[0]
    steps, size = plan_steps(*made[0]), first_data.tokens_per_step
    tokens, of = steps * size, f"{arms[0][0]}'s {steps * size:,} tokens"
    multiple = math.lcm(*(data.tokens_per_step for _, data, _ in made))
    settled, others = list[Asked](), ""
    for (label, arm), (model, data, trainer) in zip(arms, made, strict=True):
        label += model.scale_options.label() * (label == arm.scale)  # options of all arms
        own, given = data.tokens_per_step, str(trainer["max_steps"])
        for key, differs in (
            ("trainer.max_steps", given != "-1" and int(given) * own != tokens),
            ("model.tokens_per_param", model.tokens_per_param != first.tokens_per_param),
        ):
            if settled and key in arm.overrides:
                wanted = f"{of} for all arms. Remove it, or set it for all arms."
                expect(not differs, f"{key} of {label!r}", arm.overrides[key], wanted)
        if tokens % own:
            hint = f"set trainer.max_steps {-(-tokens // multiple) * multiple // size} for all arms."
            raise ConfigError(f"{of} are no multiple of the {own:,} tokens of a step of {label!r}; {hint}")
        more = {} if given == str(tokens // own) else {"trainer.max_steps": tokens // own}
        settled.append((label, replace(arm, overrides={**arm.overrides, **more})))
        others += f"; {tokens // own:,} steps of {label}" * (own != size)
    share = f"{tokens / first.plan.n_activated:.3g} per parameter of {arms[0][0]}"
    text = f"every arm trains for {tokens:,} tokens, {share}: {steps:,} steps of {size:,}{others}."
    return settled, text, first, first_data
