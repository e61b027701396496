"""Comparability of runs: different corpora or tokenizers are refused, different configs are warned about."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from lightning_sv.errors import ConfigError, expect
from lightning_sv.experiments.claims.pooling import CORPUS_KEYS
from lightning_sv.experiments.kinds.base import LoadedPanel, alike
from lightning_sv.runs.directory import SUMMARY, config_value
from lightning_sv.runs.events import Run
from lightning_sv.runs.provenance import changed_numerics, schedule_lengths
from lightning_sv.settings.yaml_file import leaves

#: keys of `data` that define the validation sets
VALIDATION_KEYS = ("val_sequences", "seq_len", "full_last_validation")
# keys that differ between the runs of each comparison
_OWN_KEYS = ("model.scale", "seed_everything", "run_dir")
_SEEDS = ("seed_everything", "model.seed", "data.seed")
_ABSENT = "(absent)"
_COMMIT = re.compile("^([^,]{10})[^,]*")


def check_same_corpus(runs: Mapping[str, Run], *, validation: bool = True) -> None:
    """Check that runs have one corpus and tokenizer, so that losses have one unit, and one validation set."""
    facts: dict[str, dict[str, Any]] = {}
    for name, run in runs.items():
        facts[name] = {key: run.summary.get(key) for key in CORPUS_KEYS}
        if missing := [key for key, value in facts[name].items() if value is None]:
            raise ConfigError(
                f"{run.dir / SUMMARY} has no {missing[0]}: its corpus is unknown. Train the run again."
            )
        if validation:
            facts[name] |= {f"data.{key}": validation_setting(run, key) for key in VALIDATION_KEYS}
    check_same_data(facts)


def validation_setting(run: Run, key: str) -> Any:
    """Return a setting of `VALIDATION_KEYS`; False for the last one in older runs, which lack it."""
    value = config_value(run.config, f"data.{key}")
    return bool(value) if key == "full_last_validation" else value


def check_same_data(facts: Mapping[str, Mapping[str, Any]], what: str = "runs") -> None:
    """Check that all runs or arms (`what`) have equal values of `CORPUS_KEYS` and of data.`VALIDATION_KEYS`."""
    for (before, expected), (name, values) in pairwise(facts.items()):
        for key, value in values.items():
            wanted = f"{expected[key]}, that of {before}. Compare {what} of one corpus, tokenizer and validation set."
            expect(value == expected[key], f"{key} of {name}", value, wanted)


def comparability_warnings(runs: Mapping[str, Run], asked: Sequence[str] = ()) -> list[str]:
    """Return warnings about differences between complete runs other than corpus and tokenizer.

    The first run is the reference. The keys in `asked` may differ, because not all arms set them. Seeds that equal
    the seed of the run, and values that contain its directory, count as equal. Recorded runs have no config; their name
    has the hash of the requested one.
    """
    warnings = _config_warnings(runs, (*_OWN_KEYS, *asked))
    facts: dict[str, Callable[[Run], Any]] = {
        "end at different tokens": lambda run: run.tokens,
        "have models of different classes": lambda run: (
            run.summary.get("built_by") or "PretrainModule"
        ),
        "have different optimizers": lambda run: (
            run.summary.get("own_optimizer") or "that of the config"
        ),
        "used different versions of torch": lambda run: run.summary.get("torch"),
        "were trained by different commits of the code": lambda run: _COMMIT.sub(
            r"\1", str(run.summary.get("commit"))
        ),
        "are from different machines": lambda run: (
            run.summary.get("machine") or "one not stated"
        ).partition(", torch ")[0],
    }
    for what, fact in facts.items():
        names: dict[str, list[str]] = {}
        for name, run in runs.items():
            names.setdefault(str(fact(run)), []).append(name)
        if len(names) > 1:
            shown = [
                f"{value} ({', '.join(same) if len(same) < 4 else f'{same[0]} and {len(same) - 1} more'})"
                for value, same in names.items()
            ]
            warnings.append(f"The runs {what}: {'; '.join(shown)}.")
    for name, run in runs.items():
        if skipped := run.summary.get("skipped_steps"):
            warnings.append(
                f"{name} skipped {skipped} steps that were not finite, which biases a comparison."
            )
        for setting, values in changed_numerics(run.summary).items():
            warnings.append(
                f"{name} was resumed with a different {setting}: {', then '.join(values)}."
            )
        if extended := schedule_lengths(run.summary):
            warnings.append(
                f"{name} was resumed with a different trainer.max_steps ({', then '.join(map(str, extended))}): its "
                "learning rate is that of no single schedule."
            )
    return warnings


def panel_warnings(panel: LoadedPanel) -> list[str]:
    """Return warnings about a panel: those of its plan, unexpected differences of configs, missing runs."""
    if panel.why_not:
        return []
    found = list(panel.warnings)
    arms = panel.spec.arms.values()
    longer = any(arm.longer != 1 for arm in arms)
    asked = [key for arm in arms for key in arm.overrides] + list(panel.spec.axes)
    asked += ["model.optim.lr", "model.backbone.init_std"]  # a tuned arm has its own
    asked += ["trainer.max_steps"] * longer + ["model.backbone"] * any(
        arm.model is not None for arm in arms
    )
    for group in alike(panel.arms):
        runs = {f"{arm.label}, run {i}": run for arm in group for i, run in enumerate(arm.runs)}
        if runs:
            check_same_corpus(runs)
            text = comparability_warnings(runs, asked)
            found += [
                f"{panel.title}: {w}"
                for w in text
                if not (longer and "end at different tokens" in w)
            ]
    if panel.sizes:
        every = {str(run.dir): run for arm in panel.arms for run in arm.runs}
        check_same_corpus(every, validation=False)
        for key in VALIDATION_KEYS:
            values = dict.fromkeys(str(validation_setting(run, key)) for run in every.values())
            if len(values) > 1:
                found.append(
                    f"{panel.title}: the sizes of one law have data.{key} {' and '.join(values)}."
                )
    return found


def _config_warnings(runs: Mapping[str, Run], own: Sequence[str]) -> list[str]:
    configs = [(name, _leaves(run)) for name, run in runs.items() if not run.recorded]
    found: dict[tuple[str, str], str] = {}  # each different value once
    for name, values in configs[1:]:
        first, reference = configs[0]
        for key in reference.keys() | values.keys():
            a, b = reference.get(key, _ABSENT), values.get(key, _ABSENT)
            is_seed = key in _SEEDS and (a, b) == (reference.get(_SEEDS[0]), values.get(_SEEDS[0]))
            unset = {str(a), str(b)} == {"None", _ABSENT}  # a newer key
            expected = any(key == k or key.startswith(f"{k}.") for k in own)
            if a != b and not (expected or is_seed or unset):
                shown = " against ".join("the default" if x is None else str(x) for x in (a, b))
                found.setdefault(
                    (key, str(b)), f"The configs differ in {key}: {shown} ({first}, {name})."
                )
    return [found[at] for at in sorted(found, key=lambda at: at[0])]


def config_of(run: Run) -> dict[str, str]:
    """Return the config of a run without strategy, seed and directory."""
    return {
        key: str(value) for key, value in _leaves(run).items() if key not in (*_OWN_KEYS, *_SEEDS)
    }


def _leaves(run: Run) -> dict[str, Any]:
    """Return the config of a run by dotted keys, with `<run_dir>` for its directory; lists as JSON."""
    directories = (str(run.dir.resolve()), str(run.dir))
    values = leaves(run.config)
    if "data.seq_len" in values:
        values["data.full_last_validation"] = validation_setting(run, "full_last_validation")
    for key, value in values.items():
        value = _without_directory(value, directories)
        values[key] = json.dumps(value, default=str) if isinstance(value, list) else value
    return values


def _without_directory(value: Any, directories: Sequence[str]) -> Any:
    """Return a value with `<run_dir>` for paths of the run's directory, and of files below it."""
    if isinstance(value, list):
        return [_without_directory(entry, directories) for entry in value]
    if isinstance(value, dict):
        return {key: _without_directory(entry, directories) for key, entry in value.items()}
    if not isinstance(value, str):
        return value

    for directory in directories:
        # A single name, such as `tiny`, may also be the value of another setting.
        if value == directory and "/" in directory:
            return "<run_dir>"
        if value.startswith(f"{directory}/"):
            return "<run_dir>" + value.removeprefix(directory)
    return value
