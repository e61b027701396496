"""Evaluation of figures: load runs, pool their scatter, decide claims, correct for the number of claims."""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from lightning_sv.analysis.verdicts import ALPHA, NOT_RESOLVED, NOT_TESTABLE
from lightning_sv.errors import NotTestableError
from lightning_sv.experiments.arms import Arm
from lightning_sv.experiments.claims.claim_types import KINDS
from lightning_sv.experiments.claims.pooling import Pool
from lightning_sv.experiments.comparability import panel_warnings
from lightning_sv.experiments.kinds.base import Panel
from lightning_sv.experiments.results import Figure, Verdict
from lightning_sv.experiments.run_store import RunStore
from lightning_sv.experiments.spec import ClaimSpec
from lightning_sv.runs.job import Job


def evaluate(figures: Sequence[Figure], runs: RunStore) -> list[Figure]:
    """Load the runs of figures and decide their claims together."""
    loaded = []
    for figure in figures:
        panels = tuple(load_runs(panel, runs) for panel in figure.panels)
        warnings = dict.fromkeys(warning for panel in panels for warning in panel_warnings(panel))
        loaded.append(replace(figure, panels=panels, warnings=tuple(warnings)))
    return evaluate_claims(loaded)


def load_runs(panel: Panel, runs: RunStore) -> Panel:
    """Load the runs of a panel, and keep the arms that its kind can compare."""
    missing = runs.missing([run for arm in panel.arms for run in arm.requests])
    unfinished = {job.name for job in missing}
    every = tuple(_with_runs(arm, runs, unfinished) for arm in panel.arms)
    lost = _lost_runs(every, missing)
    panel = replace(panel, every=every)
    try:
        arms = _compared(panel)
    except NotTestableError as error:
        return replace(panel, arms=(), why_not=str(error))

    warnings = list(panel.warnings)
    if lost:
        warnings.append(f"{panel.title} lacks runs: {'; '.join(lost)}. {panel.kind.lost_runs}")
    warnings += _changed_source(panel, runs)
    panel = replace(panel, warnings=tuple(warnings))
    if every and not arms:
        return replace(panel, arms=(), why_not="; ".join(lost))

    table = panel.kind.measure(panel.spec, arms) if panel.why_not is None else None
    notes = trained(arms)
    if table is not None and table.note:
        notes = (table.note, *notes)
    return replace(panel, arms=arms, table=table, notes=notes)


def _compared(panel: Panel) -> tuple[Arm, ...]:
    """Return the arms that are compared, with the runs that count; empty if there are none."""
    if not panel.every:
        return ()
    kept = panel.kind.comparable(panel.every)
    if panel.kind.uses_every_seed:
        return tuple(kept)
    planned = panel.arms[0].seeds
    seeds = [seed for seed in planned if all(seed in arm.seeds for arm in kept)]
    return tuple(arm.on(seeds) for arm in kept) if seeds else ()


def _lost_runs(every: Sequence[Arm], missing: Sequence[Job]) -> list[str]:
    """Return sentences on runs that diverged, and on those that did not finish."""
    lost = []
    for arm in every:
        if diverged := len(arm.diverged):
            lost.append(f"{diverged} of {diverged + len(arm.runs)} runs of {arm.label} diverged")
    if missing:
        first = missing[0]
        lost.append(f"{len(missing)} of its runs did not finish, the first being {first.title} ({first.log})")
    return lost


def _changed_source(panel: Panel, runs: RunStore) -> list[str]:
    """Warn about own modules whose source is not that of the runs."""
    unknown: set[str] = set()
    for arm in panel.every:
        for run_spec, seed in arm.requests:
            unknown |= runs.unknown_modules(run_spec, seed)
    if not unknown:
        return []
    names = ", ".join(sorted(unknown))
    return [f"{panel.title}: the source of {names} has changed since its runs, or is not recorded for them."]


def _with_runs(arm: Arm, runs: RunStore, unfinished: Collection[str]) -> Arm:
    """Return an arm with its runs that ended, on their seeds, and those that diverged."""
    read = [(seed, runs.read(spec, seed)) for spec, seed in arm.requests if spec.key(seed) not in unfinished]
    ended = {seed: run for seed, run in read if math.isfinite(run.val_loss)}
    diverged = tuple(run for seed, run in read if seed not in ended)
    return replace(arm, runs=tuple(ended.values()), seeds=tuple(ended), diverged=diverged)


def trained(arms: Sequence[Arm]) -> tuple[str, ...]:
    """Return sentences on the training of arms, one for all arms that differ only in their strategy."""
    groups: dict[tuple[str, ...], list[str]] = {}
    specs = [(arm, arm.run_spec) for arm in arms if arm.run_spec]
    for arm, spec in specs:
        budget = f"{spec.steps:,} steps, {spec.tokens_per_param:.1f} tokens per parameter, {len(arm.seeds)} seeds"
        groups.setdefault((spec.model, spec.details, budget), []).append(arm.label)
    notes = dict.fromkeys(spec.note for _, spec in specs if spec.note)
    return (*(f"{', '.join(common)}: {'; '.join(labels)}." for common, labels in groups.items()), *notes)


def evaluate_claims(figures: Sequence[Figure]) -> list[Figure]:
    """Decide each claim of figures with runs, and correct the verdicts for their number."""
    evaluated = []
    for figure in figures:
        pool = Pool()
        for panel in figure.panels:
            panel.add_to(pool)
        panels = [replace(panel, pool=pool) for panel in figure.panels]
        claims = [(claim, evaluate_claim(claim, panel, figure)) for panel in panels for claim in panel.spec.claims]
        available = tuple(p for p in panels if p.why_not is None or any(x.runs or x.diverged for x in p.every))
        evaluated.append(replace(figure, panels=available, verdicts=one_primary(claims)))
    return corrected(evaluated)


def evaluate_claim(claim: ClaimSpec, panel: Panel, figure: Figure) -> list[Verdict]:
    """Decide a claim, or return why its runs or this budget do not test it."""
    try:
        skipped = (panel.spec.arms[x].skip_under for x in (claim.a, claim.b) if x in panel.spec.arms)
        reasons = [reason[figure.budget] for reason in (claim.skip_under, *skipped) if figure.budget in reason]
        if why_not := next(iter(reasons), panel.why_not):
            raise NotTestableError(why_not)
        for arm in panel.every:
            if arm.label in (claim.a, claim.b) and not arm.runs:
                reason = "diverged" if arm.diverged else "are missing"
                raise NotTestableError(f"all runs of {arm.label} {reason}")
        results = verdicts(claim, panel, figure.paper_scale)
    except NotTestableError as why:  # the other claims are still decided
        results = [not_testable(claim, str(why).rstrip("."))]
    return [replace(verdict, panel=panel.title) for verdict in results]


def verdicts(claim: ClaimSpec, panel: Panel, paper_scale: bool = False) -> list[Verdict]:
    """Decide a claim: one verdict per part, and per size unless it is about a slope.

    Raises:
        NotTestableError: a slope of one size, or a run without the values of the claim
    """
    if claim.kind == "slope" and len(panel.sizes) < 2:
        raise NotTestableError("one size gives no slope")
    by_size = [replace(claim, a=f"{claim.a}, {s}", b=f"{claim.b}, {s}") for s in panel.sizes]
    results = []
    for each in by_size if by_size and claim.kind != "slope" else [claim]:
        if why := _ends_early(each, panel):
            results.append(not_testable(each, why))
        else:
            results += [_verdict(part, panel, paper_scale) for part in KINDS[claim.kind].parts(each)]
    return results


def _ends_early(claim: ClaimSpec, panel: Panel) -> str:
    """Return why runs are too short: they end before A is known to pass B. Empty if they are long enough."""
    if not claim.crossing:
        return ""
    arms = panel.arms if claim.kind == "slope" else [panel.arm(claim.a), panel.arm(claim.b)]
    steps = min((arm.run_spec.steps for arm in arms if arm.run_spec), default=claim.crossing)
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
    return Verdict(statement(claim), NOT_TESTABLE, f"Not testable here: {why}.", None, None, None, 0, None, claim.paper)


def _verdict(claim: ClaimSpec, panel: Panel, paper_scale: bool) -> Verdict:
    kind = KINDS[claim.kind]
    estimate = kind.measure(claim, panel)
    d, detail = estimate.d, estimate.detail
    margin = math.log(claim.margin or 1.0) if estimate.unit == "times" else claim.margin
    word, p, to_go = estimate.outcome or kind.test(estimate.tested or d, margin)
    word = word if d.se is not None else NOT_RESOLVED  # one pair gives no verdict
    p *= 2 * ALPHA / (1 - d.confidence)  # p is below ALPHA if the interval decides, whatever its coverage
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
    tested = [(claim, [v for v in results if v.verdict != NOT_TESTABLE]) for claim, results in claims]
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
        p_values |= dict(zip(group, rule([min(1.0, 2 / v.sides * v.p) for v in group if v.p is not None]), strict=True))

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
    corrected[order] = np.maximum.accumulate(np.minimum(1.0, (n - np.arange(n)) * np.sort(p_values)))
    return [float(p) for p in corrected]


def benjamini_hochberg(p_values: Sequence[float]) -> list[float]:
    """Correct p values (N,): of those below alpha, at most a share of alpha is expected to be false.

    Y. Benjamini and Y. Hochberg, Controlling the false discovery rate, J. R. Statist. Soc. B 57 (1995).
    """
    from scipy.stats import false_discovery_control  # the import takes a second

    return [float(p) for p in false_discovery_control(p_values)] if p_values else []
