"""Comparability of runs: different corpora are refused, different configs are warned about."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pandas as pd

from lightning_sv.errors import ConfigError, expect
from lightning_sv.experiments.arms import Arm, runs_of
from lightning_sv.experiments.claims.pooling import CORPUS_KEYS
from lightning_sv.experiments.kinds.base import LoadedPanel, by_size
from lightning_sv.runs.directory import SUMMARY, config_value
from lightning_sv.runs.events import Run
from lightning_sv.runs.segments import changed_numerics, schedule_lengths
from lightning_sv.settings.sections import leaves

#: keys of `data` that define the validation sets
VALIDATION_KEYS = ("val_sequences", "seq_len", "full_last_validation")
# keys that differ between the runs of each comparison, and sections of them
_OWN_KEYS = ("model.scale.", "seed_everything.", "run_dir.")


def check_same_corpus(runs: Mapping[str, Run], *, validation: bool = True) -> None:
    """Check that runs have one corpus and tokenizer, so that losses have one unit.

    Args:
        runs: name -> run
        validation: if True, they also need one validation set

    Raises:
        ConfigError: names the key and two of the runs
    """
    facts = {}
    for name, run in runs.items():
        facts[name] = {key: run.summary.get(key) for key in CORPUS_KEYS}
        for key, value in facts[name].items():
            if value is None:
                found = f"{run.dir / SUMMARY} has no {key}: its corpus is unknown"
                raise ConfigError(f"{found}. Train the run again.")
        if validation:
            facts[name] |= _validation_set(run)
    check_same_data(facts)


def _validation_set(run: Run) -> dict[str, Any]:
    """Return the settings of `VALIDATION_KEYS` of a run."""
    settings = {f"data.{key}": config_value(run.config, f"data.{key}") for key in VALIDATION_KEYS}
    settings["data.full_last_validation"] = run.full_last_validation  # absent if it is false
    return settings


def check_same_data(facts: Mapping[str, Mapping[str, Any]], what: str = "runs") -> None:
    """Check that all runs or arms have equal data.

    Args:
        facts: name -> values of `CORPUS_KEYS` and of data.`VALIDATION_KEYS`
        what: runs or arms
    """
    hint = f"Compare {what} of one corpus, tokenizer and validation set."
    for (first, values_of_first), (second, values_of_second) in pairwise(facts.items()):
        for key, value in values_of_second.items():
            other = values_of_first[key]
            expect(value == other, f"{key} of {second}", value, f"{other}, that of {first}. {hint}")


def comparability_warnings(runs: Mapping[str, Run]) -> list[str]:
    """Return warnings about differences between complete runs other than corpus and tokenizer.

    Each warning lists all values with their runs. Runs of a plan need `training_warnings` alone,
    because their names have the hash of their settings.
    """
    settings = [_compared_settings(run) for run in runs.values()]
    table = pd.DataFrame(settings, list(runs), dtype=object).fillna("the default")
    warnings = [f"The runs differ in {key}: {values}." for key, values in _differences(table)]
    return warnings + training_warnings(runs)


def training_warnings(runs: Mapping[str, Run]) -> list[str]:
    """Return warnings about differences in how runs were trained, apart from their settings."""
    warnings = []
    facts = pd.DataFrame([_facts(run) for run in runs.values()], list(runs))
    for predicate, values in _differences(facts):
        warnings.append(f"The runs {predicate}: {values}.")
    for name, run in runs.items():
        warnings += _resume_warnings(name, run)
    return warnings


def _differences(table: pd.DataFrame) -> Iterator[tuple[str, str]]:
    """Yield each column whose values differ between runs, and the runs of each value."""
    names = table.index.to_series()
    for column in sorted(table):
        runs_by_value = names.groupby(table[column], sort=False).agg(_name_list)
        if len(runs_by_value) > 1:
            values = [f"{value} ({listed})" for value, listed in runs_by_value.items()]
            yield column, "; ".join(values)


def _facts(run: Run) -> dict[str, str]:
    """Return predicate -> value; runs that differ in a value have the warning `The runs ...`."""
    summary = run.summary
    # versions follow in the same text; torch's is a fact of its own
    machine, _, _ = (summary.get("machine") or "one not stated").partition(", torch ")
    return {
        "have models of different classes": str(summary.get("built_by") or "PretrainModule"),
        "have different optimizers": str(summary.get("own_optimizer") or "that of the config"),
        "used different versions of torch": str(summary.get("torch")),
        "were trained by different commits of the code": _short_commit(summary.get("commit")),
        "are from different machines": machine,
    }


def _short_commit(commit: object) -> str:
    """Return ten digits of a commit, with what follows them: `, with uncommitted changes`."""
    digits, comma, changes = str(commit).partition(",")
    return f"{digits[:10]}{comma}{changes}"


def _name_list(names: Iterable[str]) -> str:
    first, *others = names
    if len(others) > 2:
        return f"{first} and {len(others)} more"
    return ", ".join([first, *others])


def _resume_warnings(name: str, run: Run) -> Iterator[str]:
    """Yield warnings about the training of one run."""
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
    check_same_corpus(runs_by_name(panel.arms), validation=False)
    differences = []
    for group in by_size(panel.arms):
        runs = runs_by_name(group)
        check_same_corpus(runs)
        differences += training_warnings(runs)
    if panel.sizes:
        differences += _size_warnings(panel.arms)
    return [*panel.warnings, *(f"{panel.title}: {difference}" for difference in differences)]


def _size_warnings(arms: Sequence[Arm]) -> Iterator[str]:
    """Yield warnings about the validation sets of the sizes of one law.

    They may differ: the paper's model of 0.25 B parameters has shorter sequences than the others.
    """
    sets = pd.DataFrame([_validation_set(run) for run in runs_of(arms)], dtype=object)
    for key, values in sets.items():
        if values.nunique(dropna=False) > 1:
            yield f"the sizes of one law have {key} {' and '.join(map(str, values.unique()))}."


def runs_by_name(arms: Sequence[Arm]) -> dict[str, Run]:
    """Return the runs of arms by names such as `llama, run 0`."""
    runs = {}
    for arm in arms:
        for i, run in enumerate(arm.runs):
            runs[f"{arm.label}, run {i}"] = run
    return runs


def _compared_settings(run: Run) -> dict[str, Any]:
    """Return tokens and config by dotted keys, without keys that each run has of its own."""
    settings: dict[str, Any] = {"tokens": run.tokens}
    for key, value in leaves(run.config).items():
        if f"{key}.".startswith(_OWN_KEYS):
            continue
        settings[key] = str(value) if isinstance(value, list) else value  # a list has no hash
    return settings
