"""Figure of your own runs, from their event files."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from rich.console import Console

from lightning_sv.errors import ConfigError, expect
from lightning_sv.experiments.arms import Arm, runs_of
from lightning_sv.experiments.comparability import (
    check_same_corpus,
    comparability_warnings,
    config_of,
)
from lightning_sv.experiments.kinds.base import LoadedPanel
from lightning_sv.experiments.pairs import Pair
from lightning_sv.experiments.report.results_csv import RESULTS, read_csv, tokens_per_param
from lightning_sv.experiments.results import Figure, count_seeds
from lightning_sv.experiments.spec import FigureSpec, PanelSpec
from lightning_sv.runs.directory import SUMMARY, event_files, is_diverged, runs_in
from lightning_sv.runs.events import Run, read_run
from lightning_sv.runs.tags import VAL_LOSS

# scalars of `callbacks.Sharpness` that a report draws
_SHARPNESS = re.compile(r"sharpness/\w+/(lambda_max|trace)")


@dataclass(frozen=True)
class FoundRun:
    """A run directory, with the label that a comparison gives it."""

    path: Path
    label: str | None = None


@dataclass(frozen=True)
class _FoundRuns:
    """Runs of a directory, and sentences on those that are left out."""

    runs: list[FoundRun]
    left_out: list[str]


def own_figure(
    dirs: Sequence[str | Path],
    *,
    labels: Sequence[str] | None = None,
    baseline: str | None = None,
    command: str = "",
) -> Figure:
    """Load runs as a figure: losses, and differences to the baseline.

    It has branch norms if all runs logged them.

    Args:
        dirs: complete runs, folders of runs, or folders that `compare` or `report` wrote
        labels: names of the runs instead of their strategies
        baseline: label of the baseline; by default that of the first run
        command: command of the report

    Raises:
        ConfigError: a directory without events, two runs of one label and seed, or runs that
            cannot be compared
    """
    places = [_runs_at(Path(path)) for path in dirs]
    found = list(chain.from_iterable(place.runs for place in places))
    left_out = chain.from_iterable(place.left_out for place in places)
    expect(bool(found), "RUN_DIR", " ".join(map(str, dirs)), "a complete run. Train one.")
    runs_by_arm = _runs_by_arm(_with_labels(found, labels))
    baseline = baseline or next(iter(runs_by_arm))
    known = f"one of {', '.join(runs_by_arm)}."
    expect(baseline in runs_by_arm, "--baseline", repr(baseline), known)

    arms = _arms(runs_by_arm, baseline)
    runs = {str(run.dir): run for run in runs_of(arms)}
    if len(runs) > 1:
        check_same_corpus(runs)
    panel = LoadedPanel.of_arms(PanelSpec("Validation loss"), arms)
    warnings = [
        *comparability_warnings(runs),
        *_seed_warnings(runs_by_arm, baseline),
        *left_out,
        *panel.unpaired,
    ]
    spec = FigureSpec(
        "runs",
        ", ".join(arm.label for arm in arms),
        _summary(arms),
        [panel.spec],
        section="Your own runs",
    )
    return Figure(
        spec,
        reported_panels(panel),
        warnings=tuple(warnings),
        command=command,
        tokens_per_param=_range_of_tokens_per_param(runs.values()),
    )


def _with_labels(found: Sequence[FoundRun], labels: Sequence[str] | None) -> Sequence[FoundRun]:
    """Return the runs with the given labels; with those of their strategies if there are none."""
    if not labels:
        return found
    if len(labels) != len(found):
        expected = f"{len(found)}, one per run"
        raise ConfigError(f"--labels has {len(labels)} names; expected {expected}.")
    return [replace(each, label=label) for each, label in zip(found, labels, strict=True)]


def _range_of_tokens_per_param(runs: Iterable[Run]) -> tuple[float, float]:
    """Return the lowest and the highest number of tokens per parameter; 0 if no run has one."""
    known = list(filter(None, map(tokens_per_param, runs)))
    return min(known, default=0.0), max(known, default=0.0)


def _runs_by_arm(found: Sequence[FoundRun]) -> dict[str, dict[int, Run]]:
    """Return label -> seed -> run.

    Raises:
        ConfigError: a run without losses or seed, or two runs of one label and seed
    """
    arms: dict[str, dict[int, Run]] = {}
    namer = _ArmNames()
    for each in found:
        run = read_run(each.path)
        run.curve(VAL_LOSS)  # refuses a run that never validated
        seed = run.summary.get("seed")
        if not isinstance(seed, int):
            found_seed = f"seed in {run.dir / SUMMARY} is {seed}"
            raise ConfigError(f"{found_seed}; expected an integer, which pairs need.")
        label = each.label or namer.name(run)
        other = arms.setdefault(label, {}).setdefault(seed, run)
        if other is not run:
            hint = "remove one, or name the arms with --labels."
            both = f"{other.dir} and {run.dir} are both {label!r} with seed {seed}"
            raise ConfigError(f"{both}; {hint}")
    return arms


class _ArmNames:
    """Names of arms: their strategies, with the settings in which they differ."""

    def __init__(self) -> None:
        self._settings: dict[str, list[dict[str, str]]] = {}

    def name(self, run: Run) -> str:
        """Return the strategy, with what differs from the first settings of the strategy."""
        settings = config_of(run)
        known = self._settings.setdefault(run.label, [])
        if settings not in known:
            known.append(settings)
        number = known.index(settings) + 1
        changes = _changes(known[0], settings)
        if len(changes) > 3:  # others may have the first three too
            changes[3:] = [f"settings {number}"]
        return ", ".join([run.label, *changes])


def _changes(first: Mapping[str, str], settings: Mapping[str, str]) -> list[str]:
    """Return each setting that is not the first one, e.g. `lr 0.01`."""
    changes = []
    for key in {**settings, **first}:
        if first.get(key) != settings.get(key):
            changes.append(f"{key.rpartition('.')[2]} {settings.get(key, 'not set')}")
    return changes


def _arms(runs_by_arm: Mapping[str, Mapping[int, Run]], baseline: str) -> list[Arm]:
    """Return the arms, the baseline first, with their runs in the order of the seeds."""
    arms = []
    for label in sorted(runs_by_arm, key=lambda label: label != baseline):
        runs = dict(sorted(runs_by_arm[label].items()))
        is_baseline = label == baseline and len(runs_by_arm) > 1
        arms.append(Arm(label, runs, baseline=is_baseline))
    return arms


def _seed_warnings(runs_by_arm: Mapping[str, Mapping[int, Run]], baseline: str) -> Iterator[str]:
    """Yield warnings about arms and the baseline that have different seeds.

    Raises:
        ConfigError: an arm shares no seed with the baseline
    """
    seeds_of_baseline = runs_by_arm[baseline].keys()
    for label, runs in runs_by_arm.items():
        shared = sorted(runs.keys() & seeds_of_baseline)
        if not shared:
            found = f"{label} and {baseline} share no seed, so there are no pairs"
            raise ConfigError(f"{found}. Train them on the same seeds.")
        alone = sorted(runs.keys() ^ seeds_of_baseline)
        if alone:
            pairs = f"{label} and {baseline} are paired on {_seed_list(shared)}"
            yield f"{pairs}; only one of them has {_seed_list(alone)}."


def _seed_list(seeds: Sequence[int]) -> str:
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    return f"seeds {', '.join(map(str, seeds))}"


def _summary(arms: Sequence[Arm]) -> str:
    counts = sorted({len(arm.runs) for arm in arms})
    seeds = " or ".join(map(count_seeds, counts))
    if len(arms) == 1:
        return f"1 arm, {seeds}."
    return f"{len(arms)} arms, {seeds}."


def _runs_at(path: Path) -> _FoundRuns:
    """Return the runs of a folder of runs or of a report; any other directory is a run."""
    complete, begun = runs_in(path)
    if complete and not event_files(path):
        return _FoundRuns(list(map(FoundRun, complete)), list(_left_out(begun)))
    if (path / RESULTS).is_file():
        return _reported_runs(path)
    return _FoundRuns([FoundRun(path)], [])


def _left_out(runs: Sequence[Path]) -> Iterator[str]:
    """Yield a sentence on the runs that are not complete, and one on those that diverged."""
    diverged = list(filter(is_diverged, runs))
    unfinished = [run for run in runs if run not in diverged]
    if unfinished:
        yield f"Left out because they are not complete: {', '.join(map(str, unfinished))}."
    if diverged:
        yield f"Left out because they diverged: {', '.join(map(str, diverged))}."


def _reported_runs(path: Path) -> _FoundRuns:
    """Return the runs of a report with the labels of their arms."""
    file = path / RESULTS
    columns, rows = read_csv(file)
    if not {"run", "arm", "seed", "val_loss"} <= set(columns):
        raise ConfigError(f"{file} is no table of runs; expected that of a report.")
    _check_labels(file, rows.values())
    labels: dict[str, str] = {}
    diverged: dict[str, str] = {}
    for row in rows.values():  # a run may be in several panels
        if row["val_loss"] == "nan":
            diverged[row["run"]] = row["arm"]
        else:
            labels[row["run"]] = row["arm"]
    runs = [FoundRun(path / run, label) for run, label in labels.items()]
    counts = Counter(diverged.values()).items()
    left_out = [f"Diverged runs of {arm}, which are left out: {n}." for arm, n in counts]
    return _FoundRuns(runs, left_out)


def _check_labels(file: Path, rows: Iterable[Mapping[str, str]]) -> None:
    """Check that each run has one label, and each label and seed one run."""
    labels: dict[str, str] = {}
    runs: dict[tuple[str, str], str] = {}
    for row in rows:
        run = row["run"]
        label = labels.setdefault(run, row["arm"])
        first = runs.setdefault((row["arm"], row["seed"]), run)
        if label != row["arm"] or first != run:
            found = f"{file} has {run} under several labels, or {row['arm']} for several runs"
            expected = "the table of a report of compare or report. Pass the directories of runs."
            raise ConfigError(f"{found}; expected {expected}")


def reported_panels(panel: LoadedPanel) -> tuple[LoadedPanel, ...]:
    """Return a panel with sentences on each pair, and panels of what its runs logged."""
    sentences = [f"{pair.verdict_sentence} {pair.efficiency_sentence}" for pair in panel.pairs]
    first = replace(panel, notes=(*sentences, *panel.notes))
    logged = [replace(panel, spec=spec) for spec in _logged_panels(runs_of(panel.arms))]
    return (first, *logged)


def _logged_panels(runs: Sequence[Run]) -> Iterator[PanelSpec]:
    """Yield panels of branch norms and sharpness, if the runs logged them."""
    # It imports matplotlib, which a dry run does not need.
    from lightning_sv.plots.run_plot import branch_curves

    if all(map(branch_curves, runs)):
        yield PanelSpec("Branches", kind="qkv")
    logged = chain.from_iterable(run.curves for run in runs)
    for tag in filter(_SHARPNESS.fullmatch, dict.fromkeys(logged)):
        yield PanelSpec(f"Hessian of the held-out loss: {tag}", kind="scalar", tag=tag)


def print_pairs(console: Console, pairs: Iterable[Pair], warnings: Iterable[str]) -> None:
    """Print two sentences per pair, and warnings."""
    for pair in pairs:
        console.print(pair.verdict_sentence, markup=False, highlight=False, style="bold")
        console.print(pair.efficiency_sentence, markup=False, highlight=False)
    for warning in warnings:
        console.print(f"Warning: {warning}", markup=False, highlight=False, style="yellow")
