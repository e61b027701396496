"""How a verdict comes about: the runs of a figure's panels are read, and then every claim is decided."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lightning_sv.experiments.checks import weaknesses
from lightning_sv.experiments.claims.table import not_testable, verdicts
from lightning_sv.experiments.overhead import measured_table, throughput_table
from lightning_sv.experiments.plan import with_pairs
from lightning_sv.experiments.results import Arm, Figure, NotTestableError, Panel, Verdict
from lightning_sv.experiments.runs import Runs
from lightning_sv.experiments.spec import ClaimSpec
from lightning_sv.runs.events import read_run


def judge(figure: Figure, runs: Runs, budget: str, command: str = "") -> Figure:
    """Read the runs of a figure and judge its claims.

    Args:
        figure: as it was planned
        runs: those that are there
        budget: name of the budget
        command: what the report says made it

    Raises:
        ValueError: a run is of another corpus, tokenizer or validation set
    """
    panels = [read(panel, runs) for panel in with_pairs(figure.panels, runs)]
    warnings = [warning for panel in panels for warning in weaknesses(panel)]
    found = [verdict for panel in panels for claim in panel.claims for verdict in decide(claim, panel, budget)]
    return replace(
        figure,
        panels=tuple(panel for panel in panels if panel.why_not is None),
        warnings=tuple(dict.fromkeys(warnings)),
        verdicts=tuple(found),
        command=command,
    )


def read(panel: Panel, runs: Runs) -> Panel:
    """A panel with its runs, on the seeds of which every run is there; it says why where there is none."""
    panel = runs.without_diverged(panel)
    arms, left_out = runs.complete(panel.arms)
    if panel.arms and not arms:
        why_not = "its pairs were not trained" if panel.outcome else left_out
        return replace(panel, arms=(), why_not=why_not, left_out=left_out if panel.outcome else None)
    arms = tuple(replace(arm, runs=tuple(read_run(runs.dir(*run)) for run in arm.wanted)) for arm in arms)
    table = None
    if panel.kind == "table" and panel.why_not is None:
        table = measured_table(Path(panel.spec.file)) if panel.spec.file else throughput_table(arms)
    notes = (table.note,) if table and table.note else ()
    return replace(panel, arms=arms, table=table, left_out=left_out, notes=(*notes, *trained(arms)))


def trained(arms: Sequence[Arm]) -> tuple[str, ...]:
    """What a reader must know of the runs: one sentence for all arms that are alike but for their strategy."""
    alike: dict[tuple[str, ...], list[str]] = {}
    recipes = {arm.label: arm.recipe for arm in arms if arm.recipe}
    for arm in arms:
        if recipe := arm.recipe:
            budget = f"{recipe.steps:,} steps, {recipe.tokens_per_param:.1f} tokens a parameter, {len(arm.seeds)} seeds"
            alike.setdefault((recipe.model, recipe.details, budget), []).append(arm.label)
    notes = dict.fromkeys(recipe.note for recipe in recipes.values() if recipe.note)
    return (*(f"{', '.join(what)}: {'; '.join(labels)}." for what, labels in alike.items()), *notes)


def decide(claim: ClaimSpec, panel: Panel, budget: str) -> list[Verdict]:
    """The verdicts on a claim; where something cannot be had, of the runs or on this budget, why not."""
    try:
        if why_not := claim.not_at.get(budget, panel.why_not):
            raise NotTestableError(why_not)
        found = verdicts(claim, panel)
    except ValueError as why:  # hours of runs stand behind the other claims
        found = (not_testable(claim, str(why).rstrip(".")),)
    return [replace(verdict, panel=panel.spec.title) for verdict in found]
