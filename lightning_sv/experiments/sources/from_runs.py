"""Figure of your own runs, from their event files."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from string import ascii_lowercase

from rich.console import Console

from lightning_sv.atomic import read_json
from lightning_sv.errors import ConfigError, expect
from lightning_sv.experiments.arms import Arm
from lightning_sv.experiments.comparability import (
    check_same_corpus,
    comparability_warnings,
    config_of,
)
from lightning_sv.experiments.kinds.base import LoadedPanel
from lightning_sv.experiments.pairs import Pair
from lightning_sv.experiments.report.results_csv import tokens_per_param
from lightning_sv.experiments.results import Figure
from lightning_sv.experiments.spec import FigureSpec, PanelSpec
from lightning_sv.runs.directory import SUMMARY, event_files, is_diverged, runs_in
from lightning_sv.runs.events import Run, read_run
from lightning_sv.runs.tags import VAL_LOSS

#: results of `compare`, in its output directory
COMPARISON = "comparison.json"
# scalars of `callbacks.Sharpness` that a report draws
_SHARPNESS = re.compile(r"sharpness/\w+/(lambda_max|trace)")


def _with_difference(label: str, known: list[dict[str, str]], settings: dict[str, str]) -> str:
    """Return a label with what differs from the first settings of the label, and add new settings to `known`."""
    if settings not in known:
        known.append(settings)
    keys = [key for key in settings | known[0] if known[0].get(key) != settings.get(key)]
    more = [f"settings {known.index(settings) + 1}"] * (
        len(keys) > 3
    )  # others may have these three differences
    return ", ".join(
        [
            label,
            *(f"{key.rpartition('.')[2]} {settings.get(key, 'not set')}" for key in keys[:3]),
            *more,
        ]
    )


def own_figure(
    dirs: Sequence[str | Path],
    *,
    labels: Sequence[str] | None = None,
    baseline: str | None = None,
    command: str = "",
) -> Figure:
    """Load runs as a figure: losses, differences to the baseline, branch norms if all runs logged them.

    `dirs` are complete runs, folders of runs, or output directories of `compare`. `labels` are names of the runs
    instead of their strategies. The baseline is by default the label of the first run.

    Raises:
        ConfigError: a directory without events, two runs of one label and seed, or runs that cannot be compared
    """
    named, lost = _expand(dirs)
    if labels and len(labels) != len(named):
        raise ConfigError(f"--labels has {len(labels)} names; expected {len(named)}, one per run.")
    arms: dict[str, dict[int, Run]] = {}
    settings: dict[str, list[dict[str, str]]] = {}
    for (path, given), label in zip(named, labels or (None,) * len(named), strict=True):
        run = read_run(path)
        run.curve(VAL_LOSS)  # refuses a run that never validated
        name, seed = label or given or run.label, run.summary.get("seed")
        if not isinstance(seed, int):
            raise ConfigError(
                f"seed in {run.dir / SUMMARY} is {seed}; expected an integer, which pairs need."
            )
        if label is None and given is None:
            name = _with_difference(name, settings.setdefault(name, []), config_of(run))
        if (
            label is None
            and (same := arms.get(name, {}).get(seed)) is not None
            and same.dir != run.dir
        ):
            name = run.dir.name
        other = arms.setdefault(name, {}).setdefault(seed, run)
        if other is not run:
            hint = "remove one, or name the arms with --labels."
            raise ConfigError(
                f"{other.dir} and {run.dir} are both {name!r} with seed {seed}; {hint}"
            )
    first = baseline or next(iter(arms))
    expect(first in arms, "--baseline", repr(first), f"one of {', '.join(arms)}.")
    checked = {str(run.dir): run for seeds in arms.values() for run in seeds.values()}
    if len(checked) > 1:
        check_same_corpus(checked)
    warnings = comparability_warnings(checked)
    for name, seeds in arms.items():
        shared = sorted(seeds.keys() & arms[first].keys())
        if not shared:
            raise ConfigError(
                f"{name} and {first} share no seed, so there are no pairs. Train them on the same seeds."
            )
        if alone := sorted(seeds.keys() ^ arms[first].keys()):
            warnings.append(
                f"{name} and {first} are paired on {_numbers_of(shared)}; only one of them has {_numbers_of(alone)}."
            )
    warnings += lost
    results = []
    for name in sorted(arms, key=lambda name: name != first):
        own, runs = zip(*sorted(arms[name].items()), strict=True)
        results.append(Arm(name, runs, baseline=name == first and len(arms) > 1, seeds=own))
    panel = LoadedPanel.of_arms(PanelSpec("Validation loss"), results)
    counts = [
        "one seed" if n == 1 else f"{n} seeds" for n in sorted({len(arm.runs) for arm in results})
    ]
    ratios = [x for run in checked.values() if (x := tokens_per_param(run)) is not None] or [0.0]
    summary = f"{len(arms)} {'arm' if len(arms) == 1 else 'arms'}, {' or '.join(counts)}."
    spec = FigureSpec(
        "runs", ", ".join(arm.label for arm in results), "Your own runs", summary, [panel.spec]
    )
    panels = described(panel)
    warnings += panel.unpaired
    return Figure(spec, panels, (), tuple(warnings), command, (min(ratios), max(ratios)))


def _numbers_of(seeds: Sequence[int]) -> str:
    return f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}"


def _expand(dirs: Sequence[str | Path]) -> tuple[list[tuple[Path, str | None]], list[str]]:
    """Return each directory, or the completed runs in it, with a comparison's labels; and sentences on other runs."""
    found, unfinished, lost = list[tuple[Path, str | None]](), list[Path](), list[str]()
    for path in map(Path, dirs):
        complete, begun = runs_in(path)
        if complete and not event_files(path):
            found += ((run, None) for run in complete)
            unfinished += begun
        elif (path / COMPARISON).is_file():
            content = read_json(path / COMPARISON, "run compare again.")
            try:  # run directories are relative to that of the comparison; a name begins with the letter of its arm
                labels = {
                    letter: arm["label"]
                    for letter, arm in zip(ascii_lowercase, content["arms"], strict=False)
                }
                found += ((path / run["dir"], labels[run["name"][0]]) for run in content["runs"])
                diverged = content.get("diverged", {})
                lost += (
                    f"Diverged runs of {arm}, which are left out: {n}."
                    for arm, n in diverged.items()
                )
            except (LookupError, TypeError, AttributeError) as error:
                raise ConfigError(
                    f"{path / COMPARISON} is damaged ({error!r}); run compare again."
                ) from error
        else:
            found.append((path, None))
    for diverged, why in ((False, "are not complete"), (True, "diverged")):
        if runs := [str(run) for run in unfinished if is_diverged(run) == diverged]:
            lost.append(f"Left out because they {why}: {', '.join(runs)}.")
    return found, lost


def described(panel: LoadedPanel) -> tuple[LoadedPanel, ...]:
    """Return a panel with a sentence on each pair, and panels for branch norms and sharpness if logged."""
    from lightning_sv.plots.run_plot import (
        branch_curves,
    )  # it imports matplotlib, which a dry run does not need

    sentences = [" ".join(pair.sentences) for pair in panel.pairs]
    runs = [run for arm in panel.arms for run in arm.runs]
    more = []
    if all(branch_curves(run) for run in runs):
        more.append(PanelSpec("Branches", kind="qkv"))
    tags = dict.fromkeys(tag for run in runs for tag in run.curves if _SHARPNESS.fullmatch(tag))
    more += [
        PanelSpec(f"Hessian of the held-out loss: {tag}", kind="scalar", tag=tag) for tag in tags
    ]
    first = replace(panel, notes=(*sentences, *panel.notes))
    return (first, *(replace(panel, spec=spec) for spec in more))


def print_pairs(console: Console, pairs: Iterable[Pair], warnings: Iterable[str]) -> None:
    """Print two sentences per pair, and warnings."""
    for pair in pairs:
        verdict, tokens = pair.sentences
        console.print(verdict, markup=False, highlight=False, style="bold")
        console.print(tokens, markup=False, highlight=False)
    for warning in warnings:
        console.print(f"Warning: {warning}", markup=False, highlight=False, style="yellow")
