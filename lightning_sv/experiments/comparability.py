"""Comparability of runs: different corpora are refused, different configs are warned about."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

from lightning_sv.errors import ConfigError, expect
from lightning_sv.experiments.arms import Arm
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
# keys that may differ between the arms of a panel, because a tuned arm has its own values
_TUNED_KEYS = ("model.optim.lr", "model.backbone.init_std")
_SEEDS = ("seed_everything", "model.seed", "data.seed")
_ABSENT = "(absent)"
_COMMIT = re.compile("^([^,]{10})[^,]*")
_DIFFERENT_TOKENS = "end at different tokens"


def check_same_corpus(runs: Mapping[str, Run], *, validation: bool = True) -> None:
    """Check that runs have one corpus and tokenizer, so that losses have one unit.

    Args:
        runs: name -> run
        validation: if True, they also need one validation set

    Raises:
        ConfigError: names the key and two of the runs
    """
    facts: dict[str, dict[str, Any]] = {}
    for name, run in runs.items():
        facts[name] = {key: run.summary.get(key) for key in CORPUS_KEYS}
        for key, value in facts[name].items():
            if value is None:
                found = f"{run.dir / SUMMARY} has no {key}: its corpus is unknown"
                raise ConfigError(f"{found}. Train the run again.")
        if validation:
            for key in VALIDATION_KEYS:
                facts[name][f"data.{key}"] = validation_setting(run, key)
    check_same_data(facts)


def validation_setting(run: Run, key: str) -> Any:
    """Return a setting of `VALIDATION_KEYS`; older runs lack the last one, which is then False."""
    value = config_value(run.config, f"data.{key}")
    return bool(value) if key == "full_last_validation" else value


def check_same_data(facts: Mapping[str, Mapping[str, Any]], what: str = "runs") -> None:
    """Check that all runs or arms have equal data.

    Args:
        facts: name -> values of `CORPUS_KEYS` and of data.`VALIDATION_KEYS`
        what: runs or arms
    """
    hint = f"Compare {what} of one corpus, tokenizer and validation set."
    for (before, expected), (name, values) in pairwise(facts.items()):
        for key, value in values.items():
            same = f"{expected[key]}, that of {before}. {hint}"
            expect(value == expected[key], f"{key} of {name}", value, same)


def comparability_warnings(runs: Mapping[str, Run], requested: Sequence[str] = ()) -> list[str]:
    """Return warnings about differences between complete runs other than corpus and tokenizer.

    The first run is the reference. Seeds that equal the seed of the run, and values that contain
    its directory, count as equal. Recorded runs have no config; their name has the hash of the
    requested one.

    Args:
        runs: name -> run
        requested: keys that may differ, because not all arms set them
    """
    warnings = _config_warnings(runs, (*_OWN_KEYS, *requested))
    warnings += _fact_warnings(runs)
    for name, run in runs.items():
        warnings += _resume_warnings(name, run)
    return warnings


def _fact_warnings(runs: Mapping[str, Run]) -> list[str]:
    """Return a warning per fact of the summaries that differs, with the runs of each value."""
    by_fact: dict[str, dict[str, list[str]]] = {}
    for name, run in runs.items():
        for what, value in _facts(run).items():
            by_fact.setdefault(what, {}).setdefault(value, []).append(name)
    warnings = []
    for what, by_value in by_fact.items():
        if len(by_value) > 1:
            values = [f"{value} ({_name_list(names)})" for value, names in by_value.items()]
            warnings.append(f"The runs {what}: {'; '.join(values)}.")
    return warnings


def _facts(run: Run) -> dict[str, str]:
    """Return what is wrong if two runs differ in it -> value."""
    summary = run.summary
    machine, _, _ = (summary.get("machine") or "one not stated").partition(", torch ")
    return {
        _DIFFERENT_TOKENS: str(run.tokens),
        "have models of different classes": str(summary.get("built_by") or "PretrainModule"),
        "have different optimizers": str(summary.get("own_optimizer") or "that of the config"),
        "used different versions of torch": str(summary.get("torch")),
        "were trained by different commits of the code": _short_commit(summary.get("commit")),
        "are from different machines": machine,
    }


def _short_commit(commit: object) -> str:
    return _COMMIT.sub(r"\1", str(commit))


def _name_list(names: Sequence[str]) -> str:
    if len(names) < 4:
        return ", ".join(names)
    return f"{names[0]} and {len(names) - 1} more"


def _resume_warnings(name: str, run: Run) -> Iterator[str]:
    """Yield warnings about the training of one run."""
    if skipped := run.summary.get("skipped_steps"):
        yield f"{name} skipped {skipped} steps that were not finite, which biases a comparison."
    for setting, values in changed_numerics(run.summary).items():
        yield f"{name} was resumed with a different {setting}: {', then '.join(values)}."
    lengths = schedule_lengths(run.summary)
    if lengths:
        changes = ", then ".join(map(str, lengths))
        found = f"{name} was resumed with a different trainer.max_steps ({changes})"
        yield f"{found}: its learning rate is that of no single schedule."


def panel_warnings(panel: LoadedPanel) -> list[str]:
    """Return warnings about a panel: of its plan, unexpected differences, missing runs."""
    if panel.why_not:
        return []
    warnings = list(panel.warnings)
    for group in alike(panel.arms):
        warnings += [f"{panel.title}: {warning}" for warning in _group_warnings(group, panel)]
    if panel.sizes:
        warnings += [f"{panel.title}: {warning}" for warning in _size_warnings(panel.arms)]
    return warnings


def _group_warnings(group: Sequence[Arm], panel: LoadedPanel) -> Iterator[str]:
    """Yield warnings about arms of one size."""
    runs = {}
    for arm in group:
        for i, run in enumerate(arm.runs):
            runs[f"{arm.label}, run {i}"] = run
    if not runs:
        return
    check_same_corpus(runs)
    specs = panel.spec.arms.values()
    has_lengths = any(spec.longer != 1 for spec in specs)
    for warning in comparability_warnings(runs, _requested_keys(panel)):
        if not (has_lengths and _DIFFERENT_TOKENS in warning):
            yield warning


def _requested_keys(panel: LoadedPanel) -> list[str]:
    """Return the keys in which the arms of a panel may differ."""
    keys = [*_TUNED_KEYS, *panel.spec.axes]
    for arm in panel.spec.arms.values():
        keys += arm.overrides
        if arm.longer != 1:
            keys.append("trainer.max_steps")
        if arm.model is not None:
            keys.append("model.backbone")
    return keys


def _size_warnings(arms: Sequence[Arm]) -> Iterator[str]:
    """Yield warnings about the validation sets of the sizes of one law."""
    runs = {str(run.dir): run for run in chain.from_iterable(arm.runs for arm in arms)}
    check_same_corpus(runs, validation=False)
    for key in VALIDATION_KEYS:
        values = dict.fromkeys(str(validation_setting(run, key)) for run in runs.values())
        if len(values) > 1:
            yield f"the sizes of one law have data.{key} {' and '.join(values)}."


def _config_warnings(runs: Mapping[str, Run], allowed: Sequence[str]) -> list[str]:
    """Return a warning per key and value in which a config differs from the first one."""
    configs = [(name, _leaves(run)) for name, run in runs.items() if not run.recorded]
    warnings: dict[tuple[str, str], str] = {}
    for name, values in configs[1:]:
        first, reference = configs[0]
        for key in reference.keys() | values.keys():
            if _is_allowed(key, allowed) or _is_equal(key, reference, values):
                continue
            pair = (reference.get(key, _ABSENT), values.get(key, _ABSENT))
            shown = " against ".join("the default" if x is None else str(x) for x in pair)
            warning = f"The configs differ in {key}: {shown} ({first}, {name})."
            warnings.setdefault((key, str(pair[1])), warning)
    return [warnings[place] for place in sorted(warnings, key=lambda place: place[0])]


def _is_allowed(key: str, allowed: Sequence[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in allowed)


def _is_equal(key: str, reference: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    before = reference.get(key, _ABSENT)
    now = values.get(key, _ABSENT)
    if key in _SEEDS and (before, now) == (reference.get(_SEEDS[0]), values.get(_SEEDS[0])):
        return True
    is_newer_key = {str(before), str(now)} == {"None", _ABSENT}
    return before == now or is_newer_key


def config_of(run: Run) -> dict[str, str]:
    """Return the config of a run without strategy, seed and directory."""
    left_out = (*_OWN_KEYS, *_SEEDS)
    return {key: str(value) for key, value in _leaves(run).items() if key not in left_out}


def _leaves(run: Run) -> dict[str, Any]:
    """Return the config of a run by dotted keys; lists as JSON.

    `<run_dir>` stands for its directory.
    """
    directories = (str(run.dir.resolve()), str(run.dir))
    values = leaves(run.config)
    if "data.seq_len" in values:
        values["data.full_last_validation"] = validation_setting(run, "full_last_validation")
    for key, value in values.items():
        value = _without_directory(value, directories)
        values[key] = json.dumps(value, default=str) if isinstance(value, list) else value
    return values


def _without_directory(value: Any, directories: Sequence[str]) -> Any:
    """Return a value with `<run_dir>` for paths of the run's directory, and below it."""
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
