"""Evaluation: load the runs of figures, pool arms that scatter alike, decide every claim, correct for their number."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from lightning_sv.analysis.verdicts import ALPHA, NOT_RESOLVED, NOT_TESTABLE
from lightning_sv.errors import NotTestableError
from lightning_sv.experiments.claims.claim_types import KINDS
from lightning_sv.experiments.claims.pooling import Pool
from lightning_sv.experiments.comparability import panel_warnings
from lightning_sv.experiments.measured_tables import measured_table, throughput_table
from lightning_sv.experiments.results import Arm, Figure, Panel, Verdict
from lightning_sv.experiments.run_store import RunStore, diverged
from lightning_sv.experiments.spec import ClaimSpec
from lightning_sv.runs.job import Job


def evaluate(figures: Sequence[Figure], runs: RunStore) -> list[Figure]:
    """Load the runs of figures and decide their claims, which share the scatter of runs, and chance.

    Raises:
        ConfigError: a run is of another corpus, tokenizer or validation set
    """
    found = []
    for figure in figures:
        panels = tuple(load_runs(panel, runs) for panel in figure.panels)
        warnings = dict.fromkeys(warning for panel in panels for warning in panel_warnings(panel))
        found.append(replace(figure, panels=panels, warnings=tuple(warnings)))
    return evaluate_claims(found)


def load_runs(panel: Panel, runs: RunStore) -> Panel:
    """A panel with its runs, on the seeds of which every run is there; it says why where there is none."""
    panel = runs.without_diverged(panel)
    every = tuple(runs.read(arm) for arm in panel.arms)
    left = runs.missing([run for arm in panel.arms for run in arm.requests])
    seeds = [seed for seed in panel.arms[0].seeds if all(seed in arm.seeds for arm in every)] if every else []
    what = _missing(left) if left else None
    if every and not seeds:
        return replace(panel, arms=(), why_not=what, every=every)
    arms = tuple(arm.on(seeds) for arm in every)
    table = None
    if panel.kind == "table" and panel.why_not is None:
        table = measured_table(Path(panel.spec.file)) if panel.spec.file else throughput_table(arms)
    notes = (*((table.note,) if table and table.note else ()), *trained(arms))
    return replace(panel, arms=arms, table=table, left_out=what, notes=notes, every=every)


def _missing(left: Sequence[Job]) -> str:
    lost = sum(map(diverged, left))
    why = f" ({lost} diverged)" if lost else ""
    return f"{len(left)} of its runs did not finish{why}, the first being {left[0].title} ({left[0].log})"


def trained(arms: Sequence[Arm]) -> tuple[str, ...]:
    """What a reader must know of the runs: one sentence for all arms that are alike but for their strategy."""
    alike: dict[tuple[str, ...], list[str]] = {}
    specs = [(arm, arm.run_spec) for arm in arms if arm.run_spec]
    for arm, spec in specs:
        budget = f"{spec.steps:,} steps, {spec.tokens_per_param:.1f} tokens per parameter, {len(arm.seeds)} seeds"
        alike.setdefault((spec.model, spec.details, budget), []).append(arm.label)
    notes = dict.fromkeys(spec.note for _, spec in specs if spec.note)
    return (*(f"{', '.join(what)}: {'; '.join(labels)}." for what, labels in alike.items()), *notes)


def evaluate_claims(figures: Sequence[Figure]) -> list[Figure]:
    """Give every claim of figures with runs a verdict, and correct the verdicts for their number."""
    pool, found = Pool(), []
    for figure in figures:
        for panel in figure.panels:
            panel.add_to(pool)
    for figure in figures:
        panels = [replace(panel, pool=pool) for panel in figure.panels]
        claims = [(claim, evaluate_claim(claim, panel, figure)) for panel in panels for claim in panel.spec.claims]
        able = tuple(panel for panel in panels if panel.why_not is None)
        found.append(replace(figure, panels=able, verdicts=one_primary(claims)))
    return corrected(found)


def evaluate_claim(claim: ClaimSpec, panel: Panel, figure: Figure) -> list[Verdict]:
    """Decide a claim; if its runs or this budget cannot, say why."""
    try:
        untrained = (panel.spec.arms[x].skip_under for x in (claim.a, claim.b) if x in panel.spec.arms)
        reasons = [of[figure.budget] for of in (claim.skip_under, *untrained) if figure.budget in of]
        if why_not := next(iter(reasons), panel.why_not):
            raise NotTestableError(why_not)
        found = verdicts(claim, panel)
    except NotTestableError as why:  # hours of runs stand behind the other claims
        found = [not_testable(claim, str(why).rstrip("."))]
    return [replace(_with_papers_number(v, figure.paper_scale), panel=panel.title) for v in found]


def verdicts(claim: ClaimSpec, panel: Panel) -> list[Verdict]:
    """Verdicts on a claim that was checked: one a part, and on a scaling panel one a size where it is about two arms.

    Raises:
        NotTestableError: one size, and the claim is about a slope; or a run has not logged what the claim is about
    """
    if claim.kind == "slope" and len(panel.sizes) < 2:
        raise NotTestableError("one size gives no slope")
    each_size = [replace(claim, a=f"{claim.a}, {s}", b=f"{claim.b}, {s}") for s in panel.sizes]
    found = []
    for each in each_size if each_size and claim.kind != "slope" else [claim]:
        if why := _ends_early(each, panel):
            found.append(not_testable(each, why))
        else:
            found += [_verdict(part, panel) for part in KINDS[claim.kind].parts(each)]
    return found


def _ends_early(claim: ClaimSpec, panel: Panel) -> str:
    """Why runs say nothing of A: they end where it is known to be behind still. Empty if they are long enough."""
    if not claim.crossing:
        return ""
    arms = panel.arms if claim.kind == "slope" else [panel.arm(claim.a), panel.arm(claim.b)]
    steps = min((arm.run_spec.steps for arm in arms if arm.run_spec), default=claim.crossing)
    known = f"{claim.a} is known to pass {claim.b} at about {claim.crossing:,}"
    return f"runs end after {steps:,} steps, and {known}" if steps < claim.crossing else ""


def statement(claim: ClaimSpec) -> str:
    """The claim in words."""
    tags = " and ".join(tag.split("/")[-2] for tag in claim.tags)
    more = f" by more than {claim.margin:g}" if claim.margin else ""
    late = claim.until == 1
    words = {"tags": tags, "more": more if late else f"{more} at {claim.until:.0%} of the tokens"}
    words["ends"] = "ends" if late else "is"
    return claim.text or KINDS[claim.kind].statement.format(**(vars(claim) | words))


def not_testable(claim: ClaimSpec, why: str) -> Verdict:
    """The verdict on what these runs, or this budget, cannot show."""
    sentence = f"Not testable here: {why}."
    return Verdict(statement(claim), NOT_TESTABLE, sentence, None, None, None, 0, None, claim.paper)


def _verdict(claim: ClaimSpec, panel: Panel) -> Verdict:
    kind = KINDS[claim.kind]
    d, detail, unit, part, sides, tested, finding = kind.measure(claim, panel)
    word, p, to_go = finding or kind.test(tested or d, kind.bound(claim))
    word = word if d.se is not None else NOT_RESOLVED  # never a verdict from one run
    p *= 2 * ALPHA / (1 - d.confidence)  # below ALPHA where the interval, whose error is its own, decides
    hint = f"; {to_go}" if word == NOT_RESOLVED and to_go else ""
    return Verdict(
        claim=statement(claim),
        verdict=word,
        sentence=f"{word.capitalize()}: {detail}{hint}.",
        estimate=d.mean,
        low=d.low,
        high=d.high,
        n=d.n,
        smallest=d.smallest_resolvable,
        paper=claim.paper,
        unit=unit,
        confidence=d.confidence,
        part=part,
        p=min(1.0, p) if d.se is not None else None,
        df=d.df,
        paper_value=claim.paper_value,
        sides=sides,
    )


def _with_papers_number(verdict: Verdict, paper_scale: bool) -> Verdict:
    """A verdict that says whether its interval holds the paper's number, where runs are of its models and tokens."""
    value, low, high = verdict.paper_value, verdict.low, verdict.high
    if not paper_scale or value is None or low is None or high is None:
        return replace(verdict, paper_value=None)
    inside = low <= value <= high
    words = f"{verdict.sentence[:-1]}; the paper's {value:+g} lies {'inside' if inside else 'outside'}."
    return replace(verdict, sentence=words, agreement="consistent" if inside else "not consistent")


def one_primary(claims: Sequence[tuple[ClaimSpec, Sequence[Verdict]]]) -> tuple[Verdict, ...]:
    """The verdicts of a figure, each once, one of them primary.

    Of the claim that its YAML says, or else of the first that can be tested; of its sizes the largest that can.
    """
    able = [(claim, [v for v in found if v.verdict != NOT_TESTABLE]) for claim, found in claims]
    said = [found for claim, found in able if claim.primary] or [found for _, found in able if found]
    primary = said[0][-1:] if said else []
    once: dict[tuple[str, str], Verdict] = {}
    for _, found in claims:
        for verdict in found:
            once.setdefault((verdict.panel, verdict.claim), verdict)
    marked = {(verdict.panel, verdict.claim) for verdict in primary}
    return tuple(replace(verdict, primary=key in marked) for key, verdict in once.items())


def corrected(figures: Sequence[Figure]) -> list[Figure]:
    """Figures whose verdicts say what is left of them: Holm over the primary ones, Benjamini-Hochberg over the rest.

    A claim that is tested by one side asks twice, for its opposite is tested too, so its p counts twice. Then among the
    primary ones that are left no false one is with probability 0.95; of the others that are left one in twenty is
    expected to be.
    """
    tested = [v for figure in figures for v in figure.verdicts if v.p is not None]
    found: dict[Verdict, float] = {}
    for primary, rule in ((True, holm), (False, benjamini_hochberg)):
        asked = [v for v in tested if v.primary == primary]
        found |= dict(zip(asked, rule([min(1.0, 2 / v.sides * v.p) for v in asked if v.p is not None]), strict=True))

    def left(verdict: Verdict) -> Verdict:
        p = found.get(verdict)
        gone = verdict.verdict != NOT_TESTABLE and (p is None or p >= ALPHA)
        return replace(verdict, p_corrected=p, corrected=NOT_RESOLVED if gone else verdict.verdict)

    return [replace(figure, verdicts=tuple(map(left, figure.verdicts))) for figure in figures]


def holm(p_values: Sequence[float]) -> list[float]:
    """P values corrected for their number: all below alpha are true findings with probability 1 - alpha.

    S. Holm, A simple sequentially rejective multiple test procedure, Scand. J. Statist. 6 (1979).

    Args:
        p_values: (N,) one a claim
    """
    order, n = np.argsort(p_values), len(p_values)
    corrected = np.empty(n)
    corrected[order] = np.maximum.accumulate(np.minimum(1.0, (n - np.arange(n)) * np.sort(p_values)))
    return [float(p) for p in corrected]


def benjamini_hochberg(p_values: Sequence[float]) -> list[float]:
    """P values corrected for their number: of all below alpha a share of alpha at most is expected to be false.

    Y. Benjamini and Y. Hochberg, Controlling the false discovery rate, J. R. Statist. Soc. B 57 (1995).

    Args:
        p_values: (N,) one a claim
    """
    from scipy.stats import false_discovery_control  # a second to import

    return [float(p) for p in false_discovery_control(p_values)] if p_values else []
