"""A user's own runs as a figure, drawn as the paper's are, from their event files."""

from collections.abc import Sequence
from pathlib import Path

from lightning_sv.analysis.decision import below, difference_sentence
from lightning_sv.analysis.paired import paired_difference
from lightning_sv.analysis.run_plot import branch_norms
from lightning_sv.experiments.checks import (
    check_same_corpus,
    comparability_warnings,
    config_differences,
)
from lightning_sv.experiments.report.tables import tokens_per_param
from lightning_sv.experiments.results import Arm, Figure, Panel, Verdict
from lightning_sv.experiments.spec import FigureSpec, PanelKind, PanelSpec
from lightning_sv.runs.directory import SUMMARY, event_files, runs_in
from lightning_sv.runs.events import VAL_LOSS, Run, read_run


def own_figure(
    dirs: Sequence[str | Path],
    *,
    labels: Sequence[str] | None = None,
    baseline: str | None = None,
    command: str = "",
) -> Figure:
    """Run directories -> a figure: losses, differences to the baseline, branch norms where all runs logged them.

    Args:
        dirs: Completed run directories, or folders whose subfolders are such.
        labels: Names of the runs in place of their strategies, one per run.
        baseline: Label of the arm compared with; the first run's when None.
        command: What the report says made it.

    Raises:
        ValueError: For a directory without events, two runs of one label and seed, an unknown baseline, runs on other
            corpora, tokenizers or validation sets, or arms that share no seed.
    """
    paths, unfinished = _expand(dirs)
    found = [read_run(path) for path in paths]
    names = list(labels or (run.label for run in found))
    if len(names) != len(found):
        raise ValueError(f"--labels names {len(names)} runs and there are {len(found)}; give one label each.")
    arms: dict[str, dict[int, Run]] = {}
    for name, run in zip(names, found, strict=True):
        run.curve(VAL_LOSS)  # refuses a run that never validated
        seeds, seed = arms.setdefault(name, {}), _seed(run)
        if seed in seeds:
            raise ValueError(
                f"{seeds[seed].dir} and {run.dir} are both {name!r} with seed {seed}; "
                "leave one out, or tell them apart with --labels."
            )
        seeds[seed] = run
    first = baseline or names[0]
    if first not in arms:
        raise ValueError(f"There is no arm {first!r} among the runs; --baseline takes one of {', '.join(arms)}.")
    checked = {str(run.dir): run for run in found}
    if len(found) > 1:
        check_same_corpus(checked)
    warnings = comparability_warnings(checked, config_differences(checked, ()))
    shared = sorted(set.intersection(*(set(seeds) for seeds in arms.values())))
    if not shared:
        raise ValueError(
            f"The arms {', '.join(arms)} share no seed, so there are no pairs; run them on the same seeds."
        )
    left = [str(run.dir) for seeds in arms.values() for seed, run in sorted(seeds.items()) if seed not in shared]
    if left:
        warnings.append(f"Left out, for not every arm has their seed: {', '.join(left)}.")
    if unfinished:
        warnings.append(f"Left out, for they are not finished: {', '.join(map(str, unfinished))}.")
    results = tuple(
        Arm(name, tuple(arms[name][seed] for seed in shared), False, name == first and len(arms) > 1)
        for name in sorted(arms, key=lambda name: name != first)
    )
    return _figure(results, tuple(warnings), command)


def _figure(arms: tuple[Arm, ...], warnings: tuple[str, ...], command: str) -> Figure:
    runs = [run for arm in arms for run in arm.runs]
    kinds: dict[str, PanelKind] = {"Validation loss": "curves"}
    if all(branch_norms(run) for run in runs):
        kinds["Branches"] = "qkv"
    panels = [Panel(PanelSpec(title, kind=kind), arms) for title, kind in kinds.items()]
    budgets = [x for run in runs if (x := tokens_per_param(run)) is not None]
    seeds = "one seed" if len(arms[0].runs) == 1 else f"{len(arms[0].runs)} seeds"
    spec = FigureSpec(
        name="runs",
        title=", ".join(arm.label for arm in arms),
        section="Your own runs",
        summary=f"{len(arms)} {'arm' if len(arms) == 1 else 'arms'}, {seeds}.",
        panels=[panel.spec for panel in panels],
    )
    verdicts = tuple(_verdict(arms[0], arm) for arm in arms[1:])
    return Figure(spec, tuple(panels), verdicts, warnings, command, min(budgets, default=0.0))


def _verdict(a: Arm, b: Arm) -> Verdict:
    """Whether B ends below the baseline A."""
    d = paired_difference([run.val_loss for run in a.runs], [run.val_loss for run in b.runs])
    sentence, claim = difference_sentence(a.label, b.label, d), f"{b.label} ends below {a.label}"
    return Verdict(claim, below(d), sentence, d.mean, d.low, d.high, d.n, d.smallest_resolvable, "")


def _seed(run: Run) -> int:
    seed = run.summary.get("seed", run.config.get("seed_everything"))
    if not isinstance(seed, int):
        raise ValueError(f"{run.dir} does not say its seed ({SUMMARY}, seed); pairs need it.")
    return seed


def _expand(dirs: Sequence[str | Path]) -> tuple[list[Path], list[Path]]:
    """Each directory, or the completed runs in it where it holds no events itself; the unfinished runs beside them."""
    found, unfinished = [], []
    for path in map(Path, dirs):
        inside, begun = runs_in(path)
        if not inside or event_files(path):
            found.append(path)
            continue
        found += inside
        unfinished += begun
    return found, unfinished
