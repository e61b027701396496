"""Figure of your own runs, from their event files."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from rich.console import Console

from lightning_sv.errors import ConfigError, expect
from lightning_sv.experiments.arms import Arm, runs_of
from lightning_sv.experiments.comparability import (
    check_same_corpus,
    comparability_warnings,
)
from lightning_sv.experiments.kinds.base import LoadedPanel
from lightning_sv.experiments.pairs import Pair
from lightning_sv.experiments.results import Figure, count_seeds
from lightning_sv.experiments.spec import FigureSpec, PanelSpec
from lightning_sv.runs.directory import SUMMARY, event_files, runs_in
from lightning_sv.runs.events import Run, check_run_directory, read_run
from lightning_sv.runs.tags import VAL_LOSS

# what an error expects
_RUNS = (
    "the directory of a run, or a folder of runs, e.g. runs/tiny. `lightning-sv runs` lists runs."
)
# scalars of `callbacks.Sharpness` that a report draws
_SHARPNESS = re.compile(r"sharpness/\w+/(lambda_max|trace)")


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
        dirs: complete runs, or folders of runs
        labels: names of the runs instead of their strategies
        baseline: label of the baseline; by default that of the first run
        command: command of the report

    Raises:
        ConfigError: no directory, or one without events; two runs of one label and seed; or runs
            that cannot be compared
    """
    run_dirs, incomplete = _find_runs(dirs)
    runs = [_read(path) for path in run_dirs]
    runs_by_arm = _runs_by_arm(runs, labels or _own_labels(runs))
    if baseline is None:
        baseline = next(iter(runs_by_arm))
    known = f"one of {', '.join(runs_by_arm)}."
    expect(baseline in runs_by_arm, "--baseline", repr(baseline), known)

    runs_by_name = {str(run.dir): run for run in runs}
    if len(runs) > 1:
        check_same_corpus(runs_by_name)
    arms = _arms(runs_by_arm, baseline)
    panel = LoadedPanel.of_arms(PanelSpec("Validation loss"), arms)
    warnings = [
        *comparability_warnings(runs_by_name),
        *_seed_warnings(arms),
        *panel.unpaired,
    ]
    if incomplete:
        names = ", ".join(map(str, incomplete))
        warnings.append(f"Left out because they did not end, or diverged: {names}.")
    title = ", ".join(arm.label for arm in arms)
    seeds = " or ".join(map(count_seeds, sorted({len(arm.runs) for arm in arms})))
    spec = FigureSpec("runs", title, f"{seeds} per arm.", [panel.spec], section="Your own runs")
    return Figure(spec, reported_panels(panel), warnings=tuple(warnings), command=command)


def _find_runs(dirs: Sequence[str | Path]) -> tuple[list[Path], list[Path]]:
    """Return the runs of directories, and the incomplete ones in folders of runs.

    Raises:
        ConfigError: no directory is given, or one is neither a run nor a folder of complete runs
    """
    if not dirs:
        raise ConfigError(f"no directory is given; expected {_RUNS}")
    run_dirs = []
    incomplete = []
    for path in map(Path, dirs):
        complete, begun = runs_in(path)
        is_folder_of_runs = complete and not event_files(path)
        if is_folder_of_runs:
            run_dirs += complete
            incomplete += begun
        else:
            check_run_directory(path, _RUNS)
            run_dirs.append(path)
    each_once = {path.resolve(): path for path in run_dirs}
    return list(each_once.values()), incomplete


def _read(path: Path) -> Run:
    """Read a run.

    Raises:
        ConfigError: a run without losses or seed
    """
    run = read_run(path)
    run.curve(VAL_LOSS)  # refuses a run that never validated
    seed = run.summary.get("seed")
    if not isinstance(seed, int):
        found = f"seed in {path / SUMMARY} is {seed}"
        raise ConfigError(f"{found}; expected an integer, which pairs need.")
    return run


def _own_labels(runs: Sequence[Run]) -> list[str]:
    """Return the label of the arm of each run: its strategy.

    If a strategy has two runs of one seed, each of its runs has the name of its directory.
    """
    counts = Counter((run.label, run.summary["seed"]) for run in runs)
    repeated = {strategy for (strategy, _), count in counts.items() if count > 1}
    return [run.dir.name if run.label in repeated else run.label for run in runs]


def _runs_by_arm(runs: Sequence[Run], labels: Sequence[str]) -> dict[str, dict[int, Run]]:
    """Return label -> seed -> run.

    Raises:
        ConfigError: a different number of labels, or two runs of one label and seed
    """
    if len(labels) != len(runs):
        expected = f"{len(runs)}, one per run"
        raise ConfigError(f"--labels has {len(labels)} names; expected {expected}.")
    arms: dict[str, dict[int, Run]] = {}
    for run, label in zip(runs, labels, strict=True):
        seed = run.summary["seed"]
        other = arms.setdefault(label, {}).setdefault(seed, run)
        if other is not run:
            hint = "remove one, or name the arms with --labels."
            both = f"{other.dir} and {run.dir} are both {label!r} with seed {seed}"
            raise ConfigError(f"{both}; {hint}")
    return arms


def _arms(runs_by_arm: Mapping[str, Mapping[int, Run]], baseline: str) -> list[Arm]:
    """Return the arms, the baseline first, with their runs in the order of the seeds."""
    arms = []
    for label in sorted(runs_by_arm, key=lambda label: label != baseline):
        runs = dict(sorted(runs_by_arm[label].items()))
        is_baseline = label == baseline and len(runs_by_arm) > 1
        arms.append(Arm(label, runs, baseline=is_baseline))
    return arms


def _seed_warnings(arms: Sequence[Arm]) -> Iterator[str]:
    """Yield warnings about arms that have other seeds than the baseline, the first one."""
    baseline, *others = arms
    for arm in others:
        alone = sorted(arm.by_seed.keys() ^ baseline.by_seed.keys())
        if alone:
            both = f"{arm.label} and {baseline.label}"
            seeds = ", ".join(map(str, alone))
            yield f"{both} are compared without runs of these seeds, which only one has: {seeds}."


def reported_panels(panel: LoadedPanel) -> tuple[LoadedPanel, ...]:
    """Return a panel with sentences on each pair, and panels of what its runs logged."""
    sentences = [f"{pair.verdict_sentence} {pair.efficiency_sentence}" for pair in panel.pairs]
    first = replace(panel, notes=(*sentences, *panel.notes))
    logged = [replace(panel, spec=spec, notes=()) for spec in _logged_panels(runs_of(panel.arms))]
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
