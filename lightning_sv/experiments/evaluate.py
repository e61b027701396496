"""Evaluation of figures: load runs, pool their scatter, decide claims, correct their number."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from lightning_sv.experiments.arms import Arm, PlannedArm
from lightning_sv.experiments.claims.corrections import correct_verdicts
from lightning_sv.experiments.claims.decide import evaluate_claim, mark_primary
from lightning_sv.experiments.claims.pooling import Pool
from lightning_sv.experiments.comparability import panel_warnings
from lightning_sv.experiments.kinds.base import LoadedPanel, PlannedPanel, add_to_pool
from lightning_sv.experiments.results import Figure, PlannedFigure, count_seeds
from lightning_sv.experiments.run_store import RunStore
from lightning_sv.runs.job import Job


def evaluate(figures: Sequence[PlannedFigure], runs: RunStore) -> list[Figure]:
    """Load the runs of figures and decide their claims together."""
    loaded = []
    for figure in figures:
        panels = load_panels(figure.panels, runs)
        warnings = dict.fromkeys(chain.from_iterable(map(panel_warnings, panels)))
        with_runs = Figure(
            figure.spec,
            panels,
            warnings=tuple(warnings),
            budget=figure.budget,
            paper_scale=figure.paper_scale,
        )
        loaded.append(with_runs)
    return decide_claims(loaded)


def load_panels(planned: Sequence[PlannedPanel], runs: RunStore) -> tuple[LoadedPanel, ...]:
    """Load the runs of the panels of one figure, which share their scatter."""
    shared = Pool()
    read = []
    for panel in planned:
        all_arms = tuple(_read_arm(arm, runs) for arm in panel.arms)
        pool = Pool() if panel.kind.has_own_pool else shared
        add_to_pool(pool, all_arms)
        read.append((panel, all_arms, pool))
    # only now, because the pool must have the arms of all panels before a difference is computed
    return tuple(_load_panel(panel, all_arms, pool, runs) for panel, all_arms, pool in read)


def _read_arm(planned: PlannedArm, runs: RunStore) -> Arm:
    """Return an arm with its runs that ended, and those that diverged."""
    ended = {}
    diverged = []
    for request in planned.requests:
        if not runs.has_ended(request):
            continue

        run = runs.read(request)
        if math.isfinite(run.val_loss):
            ended[request.seed] = run
        else:
            diverged.append(run)
    return planned.with_runs(ended, diverged)


def _load_panel(
    planned: PlannedPanel, all_arms: tuple[Arm, ...], pool: Pool, runs: RunStore
) -> LoadedPanel:
    """Keep the arms that the kind of the panel can compare."""
    without_arms = LoadedPanel(
        planned.spec, (), all_arms, pool, skipped=planned.skipped, why_not=planned.why_not
    )
    if planned.why_not is not None:
        return without_arms
    arms = planned.kind.comparable(all_arms)
    lost = "; ".join(_lost_runs(all_arms, runs.missing(planned.requests)))
    if all_arms and not arms:
        return replace(without_arms, why_not=lost)

    warnings = list(planned.warnings)
    if lost:
        warnings.append(f"{planned.title} lacks runs: {lost}. {planned.kind.lost_runs}")
    return replace(without_arms, arms=arms, warnings=tuple(warnings), notes=_training_notes(arms))


def _lost_runs(all_arms: Sequence[Arm], missing: Sequence[Job]) -> list[str]:
    """Return sentences on runs that diverged, and on those that did not finish."""
    lost = []
    for arm in all_arms:
        count = len(arm.diverged)
        if count > 0:
            lost.append(f"{count} of {count + len(arm.runs)} runs of {arm.label} diverged")
    if missing:
        first = f"the first being {missing[0].title} ({missing[0].log})"
        lost.append(f"{len(missing)} of its runs did not finish, {first}")
    return lost


def _training_notes(arms: Sequence[Arm]) -> tuple[str, ...]:
    """Return sentences on the training of arms, one for all that differ only in their strategy."""
    labels: dict[str, list[str]] = {}
    notes = dict[str, None]()
    for arm in arms:
        spec = arm.run_spec
        assert spec is not None  # the arms are planned
        per_param = f"{spec.tokens_per_param:.1f} tokens per parameter"
        length = f"{spec.steps:,} steps, {per_param}, {count_seeds(len(arm.seeds))}"
        training = f"{spec.model}, {spec.details}, {length}"
        labels.setdefault(training, []).append(arm.label)
        if spec.note:
            notes[spec.note] = None
    sentences = [f"{training}: {'; '.join(trained)}." for training, trained in labels.items()]
    return (*sentences, *notes)


def decide_claims(figures: Sequence[Figure]) -> list[Figure]:
    """Decide each claim of figures with runs, and correct the verdicts for their number.

    The figures keep the panels that a report shows.
    """
    decided = []
    for figure in figures:
        results = []
        for panel in figure.panels:
            for claim in panel.spec.claims:
                results.append((claim, evaluate_claim(claim, panel, figure)))
        shown = tuple(panel for panel in figure.panels if panel.is_shown)
        decided.append(replace(figure, panels=shown, verdicts=mark_primary(results)))
    return correct_verdicts(decided)
