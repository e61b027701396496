"""Evaluation of figures: load runs, pool their scatter, decide claims, correct for the number of claims."""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from lightning_sv.errors import NotTestableError
from lightning_sv.experiments.arms import Arm, PlannedArm
from lightning_sv.experiments.claims.claim_types import KINDS
from lightning_sv.experiments.claims.pooling import Pool
from lightning_sv.experiments.comparability import panel_warnings
from lightning_sv.experiments.kinds.base import LoadedPanel, PlannedPanel, add_to_pool
from lightning_sv.experiments.results import Figure, PlannedFigure, Verdict
from lightning_sv.experiments.run_store import RunStore
from lightning_sv.experiments.spec import ClaimSpec
from lightning_sv.runs.job import Job
from lightning_sv.statistics.verdicts import ALPHA, NOT_RESOLVED, NOT_TESTABLE


def evaluate(figures: Sequence[PlannedFigure], runs: RunStore) -> list[Figure]:
    """Load the runs of figures and decide their claims together."""
    return evaluate_claims([load_figure(figure, runs) for figure in figures])


def load_figure(planned: PlannedFigure, runs: RunStore) -> Figure:
    """Load the runs of a figure, whose panels share their scatter."""
    panels = load_panels(planned.panels, runs)
    warnings = dict.fromkeys(warning for panel in panels for warning in panel_warnings(panel))
    return Figure(
        planned.spec,
        panels,
        warnings=tuple(warnings),
        tokens_per_param=planned.tokens_per_param,
        budget=planned.budget,
        paper_scale=planned.paper_scale,
    )


def load_panels(planned: Sequence[PlannedPanel], runs: RunStore) -> tuple[LoadedPanel, ...]:
    """Load the runs of the panels of one figure."""
    pool = Pool()
    arms_of_panels = []
    for panel in planned:
        unfinished = {job.name for job in runs.missing(panel.requests)}
        arms = tuple(_read_arm(arm, runs, unfinished) for arm in panel.arms)
        add_to_pool(pool, panel.spec, arms)
        arms_of_panels.append(arms)
    return tuple(
        _load_panel(panel, arms, pool, runs)
        for panel, arms in zip(planned, arms_of_panels, strict=True)
    )


def _load_panel(
    planned: PlannedPanel, every: tuple[Arm, ...], pool: Pool, runs: RunStore
) -> LoadedPanel:
    """Keep the arms that the kind of the panel can compare."""
    arms: tuple[Arm, ...] = ()
    why_not = planned.why_not
    lost = _lost_runs(every, runs.missing(planned.requests))
    try:
        arms = planned.kind.comparable(every)
    except NotTestableError as error:
        why_not = str(error)
    if every and not arms and why_not is None:
        why_not = "; ".join(lost)
    if why_not is not None:
        return LoadedPanel(planned.spec, (), every, pool, skipped=planned.skipped, why_not=why_not)

    warnings = list(planned.warnings)
    if lost:
        warnings.append(f"{planned.title} lacks runs: {'; '.join(lost)}. {planned.kind.lost_runs}")
    warnings += _changed_source(planned, runs)
    table = planned.kind.measure(planned.spec, arms)
    notes = trained(arms)
    if table is not None and table.note:
        notes = (table.note, *notes)
    return LoadedPanel(
        planned.spec,
        arms,
        every,
        pool,
        table,
        planned.skipped,
        warnings=tuple(warnings),
        notes=notes,
    )


def _lost_runs(every: Sequence[Arm], missing: Sequence[Job]) -> list[str]:
    """Return sentences on runs that diverged, and on those that did not finish."""
    lost = []
    for arm in every:
        if diverged := len(arm.diverged):
            lost.append(f"{diverged} of {diverged + len(arm.runs)} runs of {arm.label} diverged")
    if missing:
        first = missing[0]
        lost.append(
            f"{len(missing)} of its runs did not finish, the first being {first.title} ({first.log})"
        )
    return lost


def _changed_source(panel: PlannedPanel, runs: RunStore) -> list[str]:
    """Warn about own modules whose source is not that of the runs."""
    unknown: set[str] = set()
    for run_spec, seed in panel.requests:
        unknown |= runs.unknown_modules(run_spec, seed)
    if not unknown:
        return []
    names = ", ".join(sorted(unknown))
    return [
        f"{panel.title}: the source of {names} has changed since its runs, or is not recorded for them."
    ]


def _read_arm(planned: PlannedArm, runs: RunStore, unfinished: Collection[str]) -> Arm:
    """Return an arm with its runs that ended, and those that diverged."""
    ended, diverged = {}, []
    for run_spec, seed in planned.requests:
        if run_spec.key(seed) in unfinished:
            continue
        run = runs.read(run_spec, seed)
        if math.isfinite(run.val_loss):
            ended[seed] = run
        else:
            diverged.append(run)
    return Arm.of(planned, ended, diverged)


def trained(arms: Sequence[Arm]) -> tuple[str, ...]:
    """Return sentences on the training of arms, one for all arms that differ only in their strategy."""
    groups: dict[tuple[str, ...], list[str]] = {}
    specs = [(arm, arm.run_spec) for arm in arms if arm.run_spec]
    for arm, spec in specs:
        budget = f"{spec.steps:,} steps, {spec.tokens_per_param:.1f} tokens per parameter, {len(arm.seeds)} seeds"
        groups.setdefault((spec.model, spec.details, budget), []).append(arm.label)
    notes = dict.fromkeys(spec.note for _, spec in specs if spec.note)
    return (
        *(f"{', '.join(common)}: {'; '.join(labels)}." for common, labels in groups.items()),
        *notes,
    )


def evaluate_claims(figures: Sequence[Figure]) -> list[Figure]:
    """Decide each claim of figures with runs, and correct the verdicts for their number."""
    evaluated = []
    for figure in figures:
        claims = [
            (claim, evaluate_claim(claim, panel, figure))
            for panel in figure.panels
            for claim in panel.spec.claims
        ]
        available = tuple(panel for panel in figure.panels if panel.is_shown)
        evaluated.append(replace(figure, panels=available, verdicts=one_primary(claims)))
    return corrected(evaluated)


def evaluate_claim(claim: ClaimSpec, panel: LoadedPanel, figure: Figure) -> list[Verdict]:
    """Decide a claim, or return why its runs or this budget do not test it."""
    why_not = _why_skipped(claim, panel, figure.budget)
    if why_not is None:
        try:
            results = verdicts(claim, panel, figure.paper_scale)
        except NotTestableError as error:  # the other claims are still decided
            why_not = str(error)
    if why_not is not None:
        results = [not_testable(claim, why_not.rstrip("."))]
    return [replace(verdict, panel=panel.title) for verdict in results]


def _why_skipped(claim: ClaimSpec, panel: LoadedPanel, budget: str) -> str | None:
    """Return why a budget does not test a claim: that of the claim, of one of its arms, or of a panel without runs."""
    if budget in claim.skip_under:
        return claim.skip_under[budget]
    for label in (claim.a, claim.b):
        if label in panel.skipped:
            return panel.skipped[label]
    return None if panel.is_shown else panel.why_not


def verdicts(claim: ClaimSpec, panel: LoadedPanel, paper_scale: bool = False) -> list[Verdict]:
    """Decide a claim by the runs of its own arms: one verdict per part, and per size unless it is about a slope.

    Raises:
        NotTestableError: an arm without runs, a slope of one size, or a run without the values of the claim
    """
    if claim.kind == "slope" or not panel.sizes:
        return _verdicts_of_parts(claim, panel, paper_scale)
    results, lacking = [], []
    for size in panel.sizes:
        at_size = replace(claim, a=f"{claim.a}, {size}", b=f"{claim.b}, {size}")
        try:
            results += _verdicts_of_parts(at_size, panel, paper_scale)
        except NotTestableError as error:  # the other sizes are still decided
            lacking.append(error)
            results.append(not_testable(at_size, str(error).rstrip(".")))
    if len(lacking) == len(panel.sizes):
        raise lacking[0]
    return results


def _verdicts_of_parts(claim: ClaimSpec, panel: LoadedPanel, paper_scale: bool) -> list[Verdict]:
    if claim.kind == "slope" and len(panel.sizes) < 2:
        raise NotTestableError("one size gives no slope")
    own = panel.only([label for label in (claim.a, claim.b) if label])
    if why := _ends_early(claim, own):
        return [not_testable(claim, why)]
    return [_verdict(part, own, paper_scale) for part in KINDS[claim.kind].parts(claim)]


def _ends_early(claim: ClaimSpec, panel: LoadedPanel) -> str:
    """Return why runs are too short: they end before A is known to pass B. Empty if they are long enough."""
    if not claim.crossing:
        return ""
    steps = min((arm.run_spec.steps for arm in panel.arms if arm.run_spec), default=claim.crossing)
    known = f"{claim.a} is known to pass {claim.b} at about {claim.crossing:,}"
    return f"runs end after {steps:,} steps, and {known}" if steps < claim.crossing else ""


def statement(claim: ClaimSpec) -> str:
    """Return the statement of a claim."""
    tags = " and ".join(tag.split("/")[-2] if tag.count("/") > 1 else tag for tag in claim.tags)
    more = f" by more than {claim.margin:g}" if claim.margin else ""
    late = claim.until == 1
    words = {"tags": tags, "more": more if late else f"{more} at {claim.until:.0%} of the tokens"}
    words["ends"] = "ends" if late else "is"
    return claim.text or KINDS[claim.kind].statement.format(**(vars(claim) | words))


def not_testable(claim: ClaimSpec, why: str) -> Verdict:
    """Return the verdict on a claim that these runs, or this budget, do not test."""
    return Verdict(
        statement(claim),
        NOT_TESTABLE,
        f"Not testable here: {why}.",
        None,
        None,
        None,
        0,
        None,
        claim.paper,
    )


def _verdict(claim: ClaimSpec, panel: LoadedPanel, paper_scale: bool) -> Verdict:
    kind = KINDS[claim.kind]
    estimate = kind.measure(claim, panel)
    d, detail = estimate.d, estimate.detail
    margin = math.log(claim.margin or 1.0) if estimate.unit == "times" else claim.margin
    word, p, to_go = estimate.outcome or kind.test(estimate.tested or d, margin)
    word = word if d.se is not None else NOT_RESOLVED  # one pair gives no verdict
    p *= (
        2 * ALPHA / (1 - d.confidence)
    )  # p is below ALPHA if the interval decides, whatever its coverage
    detail += f"; {to_go}" if word == NOT_RESOLVED and to_go else ""
    for arm in panel.arms:  # the remaining runs are selected by their success
        if arm.diverged and arm.label in (claim.a, claim.b):
            detail += f"; diverged runs of {arm.label}, which are left out: {len(arm.diverged)}"
    value, agreement = None, ""
    compared = paper_scale and not estimate.part  # another quantity than the paper's number
    if compared and claim.paper_value is not None and d.low is not None and d.high is not None:
        value, inside = claim.paper_value, d.low <= claim.paper_value <= d.high
        detail += f"; the paper's {value:+g} lies {'inside' if inside else 'outside'}"
        agreement = "consistent" if inside else "not consistent"
    return Verdict(
        claim=statement(claim),
        verdict=word,
        sentence=f"{word.capitalize()}: {detail}.",
        estimate=d.mean,
        low=d.low,
        high=d.high,
        n=d.n,
        smallest=d.smallest_resolvable,
        paper=claim.paper,
        unit=estimate.unit,
        confidence=d.confidence,
        part=estimate.part,
        p=min(1.0, p) if d.se is not None else None,
        df=d.df,
        paper_value=value,
        agreement=agreement,
        sides=estimate.sides,
        own_low=None if d.alone is None else d.alone.low,
        own_high=None if d.alone is None else d.alone.high,
    )


def one_primary(claims: Sequence[tuple[ClaimSpec, Sequence[Verdict]]]) -> tuple[Verdict, ...]:
    """Return the verdicts of a figure without duplicates, and mark the primary one.

    It is that of the claim marked in the YAML, or else of the first claim that was tested; of its largest tested size.
    """
    tested = [
        (claim, [v for v in results if v.verdict != NOT_TESTABLE]) for claim, results in claims
    ]
    chosen = [results for claim, results in tested if claim.primary]
    candidates = chosen or [results for _, results in tested if results]
    primary = candidates[0][-1:] if candidates else []
    once: dict[tuple[str, str, str], Verdict] = {}
    for verdict in (verdict for _, results in claims for verdict in results):
        once.setdefault((verdict.panel, verdict.claim, verdict.sentence), verdict)
    marked = {(verdict.panel, verdict.claim, verdict.sentence) for verdict in primary}
    return tuple(replace(verdict, primary=key in marked) for key, verdict in once.items())


def corrected(figures: Sequence[Figure]) -> list[Figure]:
    """Correct the verdicts of figures for their number: Holm for the primary ones, Benjamini-Hochberg for the others.

    One-sided p values count twice, because the opposite of the claim is tested too. With probability 0.95, no primary
    verdict that remains is false; of the others that remain, one in twenty is expected to be false.
    """
    tested = [v for figure in figures for v in figure.verdicts if v.p is not None]
    p_values: dict[Verdict, float] = {}
    for primary, rule in ((True, holm), (False, benjamini_hochberg)):
        group = [v for v in tested if v.primary == primary]
        p_values |= dict(
            zip(
                group,
                rule([min(1.0, 2 / v.sides * v.p) for v in group if v.p is not None]),
                strict=True,
            )
        )

    def correct(verdict: Verdict) -> Verdict:
        p = p_values.get(verdict)
        lost = verdict.verdict != NOT_TESTABLE and (p is None or p >= ALPHA)
        return replace(verdict, p_corrected=p, corrected=NOT_RESOLVED if lost else verdict.verdict)

    return [replace(figure, verdicts=tuple(map(correct, figure.verdicts))) for figure in figures]


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p values (N,): with probability 1 - alpha, none below alpha is false.

    S. Holm, A simple sequentially rejective multiple test procedure, Scand. J. Statist. 6 (1979).
    """
    order, n = np.argsort(p_values), len(p_values)
    corrected = np.empty(n)
    corrected[order] = np.maximum.accumulate(
        np.minimum(1.0, (n - np.arange(n)) * np.sort(p_values))
    )
    return [float(p) for p in corrected]


def benjamini_hochberg(p_values: Sequence[float]) -> list[float]:
    """Correct p values (N,): of those below alpha, at most a share of alpha is expected to be false.

    Y. Benjamini and Y. Hochberg, Controlling the false discovery rate, J. R. Statist. Soc. B 57 (1995).
    """
    from scipy.stats import false_discovery_control  # the import takes a second

    return [float(p) for p in false_discovery_control(p_values)] if p_values else []
