"""Numbers of a report as rows of runs, differences and claims: CSV files and tables of the page."""

import csv
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_sv.analysis.paired import PairedDifference, paired_difference, percent, tokens_to_reach
from lightning_sv.analysis.scaling import ScalingFit
from lightning_sv.analysis.verdicts import count_pairs, direction, times
from lightning_sv.atomic import atomic_path, check_writable
from lightning_sv.errors import ConfigError
from lightning_sv.experiments.results import Arm, Figure, Panel, Series, Verdict, pairs_of
from lightning_sv.json_text import json_text
from lightning_sv.runs.events import COPYING, LATE_TRAIN_LOSS, VAL_LOSS, Run
from lightning_sv.runs.results_csv import RESULTS, curve_text, plain_cell, read_csv

PAPER_TOKENS_PER_PARAM = 100
#: heading of a ratio; above 1, the baseline needs more tokens than the arm
TOKEN_FACTOR = "tokens of the baseline / own tokens"
#: heading of the mean training loss of the last tenth of the steps
LATE_TRAINING = "training loss, last tenth"
#: heading of an interval without pooling, next to the pooled one if the pairs are few
OWN_SCATTER = "by the scatter of the pairs alone"
#: files of the report
PAGES = ("report.md", "report.html")
#: kinds of tokens in `callbacks.copying.token_kinds`
TOKEN_KINDS = ("repeat", "seen", "unseen")
GAIN = f"{COPYING}second_minus_first"
#: nats per token; loss on the second copy of a text minus that on the first, below which the circuit counts as formed
FORMED = -0.5
_SUMMARY = (
    "steps", "parameters", "activated_parameters", "lr", "seconds", "corpus_hash", "tokenizer_sha256", "torch",
    "commit", "date", "machine",
)  # fmt: skip
# beginnings of the tags of `TrainingMonitor` and `RelativeSteps` that have a column
_CLIPPED = "clipped_steps"
_ROLE_STEP = "relative_step/role/"
_OF_STEPS = (_CLIPPED, _ROLE_STEP, "relative_step/mean/")
_DIFFERENCE = ("figure", "panel", "arm", "baseline", "quantity", "n", "estimate", "low", "high", "own_low", "own_high")


def tokens_per_param(run: Run) -> float | None:
    """Return training tokens per activated parameter; None if the summary has no parameters."""
    parameters = run.summary.get("activated_parameters") or run.summary.get("parameters")
    return run.tokens / parameters if parameters else None


def run_rows(figures: Sequence[Figure], out: Path) -> list[dict[str, Any]]:
    """Return one row per run of each panel, also without a pair or diverged; `runs.results_csv` reads them.

    If a run measured copying or steps, there is one column per tag. Run directories are relative to `out`, the folder
    of the report, so that a report written to a different folder has equal rows.
    """
    return [
        {
            "figure": figure.spec.name,
            "panel": panel.title,
            "kind": panel.kind,
            "arm": arm.label,
            "ours": arm.ours,
            "baseline": arm.baseline,
            "seed": run.summary.get("seed"),
            "tokens": run.tokens,
            "tokens_per_param": tokens_per_param(run),
            "epochs": run.summary.get("epochs"),
            "val_loss": run.val_loss,
            LATE_TRAIN_LOSS: run.late_train_loss,
            **step_columns(run),
            **{key: run.summary.get(key) for key in _SUMMARY},
            "run": os.path.relpath(run.dir, out),
            "curve": curve_text(run.curve(VAL_LOSS)),
            **{tag: curve_text(curve) for tag, curve in sorted(run.curves.items()) if tag.startswith(COPYING)},
        }
        for figure in figures
        for panel in figure.panels
        for arm in panel.every or panel.arms
        for run in (*arm.runs, *arm.diverged)
    ]


def step_columns(run: Run) -> dict[str, float]:
    """Return the share of clipped steps and the relative steps per role and branch, each the mean over the run."""
    known = run.summary if run.recorded else run.curves  # a recording has these columns
    tags = sorted(tag for tag in known if tag.startswith(_OF_STEPS))
    if run.recorded:
        return {tag: float(run.summary[tag]) for tag in tags}
    return {tag: float(run.curves[tag].values.mean()) for tag in tags}


def steps_table(panel: Panel) -> tuple[list[str], list[list[str]]]:
    """Return header and rows: share of clipped steps and relative step per role; empty if no run measured them."""
    arms = sorted(panel.arms, key=lambda arm: not arm.baseline)
    means = [_mean_steps(arm) for arm in arms]
    roles = sorted({tag for row in means for tag in row if tag.startswith(_ROLE_STEP)})
    is_clipped_known = any(_CLIPPED in row for row in means)
    if not (roles or is_clipped_known):
        return [], []

    columns = ["arm", "clipped steps"]
    columns += [f"relative step, {tag.removeprefix(_ROLE_STEP)}" for tag in roles]
    rows = []
    for arm, mean in zip(arms, means, strict=True):
        clipped = f"{mean[_CLIPPED]:.1%}" if _CLIPPED in mean else ""
        steps = [f"{mean[tag]:.2e}" if tag in mean else "" for tag in roles]
        rows.append([arm.name, clipped, *steps])
    return columns, rows


def _mean_steps(arm: Arm) -> dict[str, float]:
    """Average `step_columns` over the runs of an arm; a tag that some of them lack is omitted."""
    measured_tags = [step_columns(run) for run in arm.runs]
    if not measured_tags:
        return {}
    shared = set.intersection(*(set(tags) for tags in measured_tags))
    return {tag: float(np.mean([tags[tag] for tags in measured_tags])) for tag in shared}


def difference_rows(figures: Sequence[Figure]) -> list[dict[str, Any]]:
    """Return one row per difference to a baseline: of final losses, in tokens, and of offset and slope of laws."""
    rows = [(f.spec.name, panel.title, *row) for f in figures for panel in f.panels for row in _differences(panel)]
    return [dict(zip(_DIFFERENCE, row, strict=True)) for row in rows]


def _differences(panel: Panel) -> Iterator[tuple[Any, ...]]:
    pairs = [((p.b.label, p.a.label), p) for p in pairs_of(panel)[0]]
    for names, pair in pairs:
        d = pair.difference
        own = (d.alone.low, d.alone.high) if d.alone else (None, None)
        yield (*names, "final loss", d.n, d.mean, d.low, d.high, *own)
    for names, pair in pairs:
        if (e := pair.efficiency).factor is not None:
            yield (*names, "token factor", e.n, e.factor, e.low, e.high, None, None)
    for names, pair in pairs:
        for kind, d in parts_of(pair.a, pair.b).items() if measured((pair.a, pair.b)) else ():
            yield (*names, f"final loss, part of {kind}", d.n, d.mean, d.low, d.high, None, None)
    for series, against, fit in _laws(panel):
        for name, d in (("offset", fit.offset), ("slope", fit.slope)):
            yield (series.label, against.label, f"{name}, {fit.form} law", None, d.mean, d.low, d.high, None, None)


def verdict_rows(figures: Sequence[Figure]) -> list[dict[str, Any]]:
    """Return one row per claim."""
    return [{"figure": figure.spec.name, **vars(verdict)} for figure in figures for verdict in figure.verdicts]


def verdicts_json(figures: Sequence[Figure], report: Path, **more: Any) -> str:
    """Return the verdicts of evaluated figures as JSON."""
    made = [
        {
            "figure": figure.spec.name,
            "title": figure.spec.title,
            "command": figure.command,
            "tokens_per_param": figure.tokens_per_param,
            "verdicts": [vars(verdict) for verdict in figure.verdicts],
            "warnings": figure.warnings,
        }
        for figure in figures
    ]
    return json_text({"report": str(report), "figures": made, **more})


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows with all their keys as header; an empty file without rows.

    Texts of runs cannot be formulas of a spreadsheet, see `plain_cell`.
    """
    rows = [{key: plain_cell(value) for key, value in row.items()} for row in rows]
    with atomic_path(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, dict.fromkeys(key for row in rows for key in row), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def check_replaceable(out: Path, ours: Iterable[Path]) -> None:
    """Refuse to overwrite a report that has none of `ours`, or a file that no report wrote."""
    check_writable(out)
    existing = [name for name in (RESULTS, *PAGES) if (out / name).exists()]
    if not existing or _is_report_without_runs(out):
        return
    runs = reported_runs(out)
    known = {path.resolve() for path in ours}
    if any({run, run.parent} & known for run in runs):
        return
    what = f"a report of other runs ({runs[0]})" if runs else f"a {existing[0]} that lightning-sv did not write"
    raise ConfigError(f"{out} contains {what}; choose a different --out.")


def _is_report_without_runs(out: Path) -> bool:
    """Return whether the table of runs is empty, so that the report has nothing to lose."""
    results = out / RESULTS
    if not results.exists():
        return False
    columns, _ = read_csv(results)
    return not columns


def reported_runs(out: Path) -> list[Path]:
    """Return the run directories of the report in a folder, absolute; none if there is no report."""
    results = out / RESULTS
    if not results.exists():
        return []
    _, rows = read_csv(results)
    names = [Path(row["run"]) for row in rows.values() if row.get("run")]
    # Reports of earlier versions have paths relative to the working directory.
    return [path.resolve() for name in names for path in (out / name, name)]


def panel_table(panel: Panel) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the table of a panel; empty for some kinds."""
    if panel.table:
        cells = [[f"{x:.4g}" if isinstance(x, float) else str(x) for x in row] for row in panel.table.rows]
        return list(panel.table.columns), cells
    if panel.kind == "scaling":
        return _law_table(panel)
    if panel.kind == "scalar":
        return _scalar_table(panel)
    if panel.kind not in ("curves", "lengths"):
        return [], []
    pairs = {pair.b.label: pair for pair in pairs_of(panel)[0]}
    several = len({len(arm.runs) for arm in panel.arms} | {pair.difference.n for pair in pairs.values()}) > 1
    rows = []
    for arm in sorted(panel.arms, key=lambda arm: not arm.baseline):
        shown = ["baseline" if arm.baseline else "", "", "", "", ""]
        if pair := pairs.get(arm.label):
            d, e = pair.difference, pair.efficiency
            ends = "" if e.low is None or e.high is None else f" ({times(e.low)} to {times(e.high)})"
            tokens = "" if e.factor is None else f"{times(e.factor)}{ends}"
            interval = _interval(d.low, d.high) + (f"; {count_pairs(d.n)}" if several else "")
            own = _interval(d.alone.low, d.alone.high) if d.alone else ""
            shown = [f"{d.mean:+.4f}", interval, own, direction(d), tokens]
        losses = [f"{arm.losses.mean():.4f}", ", ".join(f"{x:.4f}" for x in arm.losses)]
        rows.append([arm.name, *losses, *shown, _late_train_loss(arm)])
    columns = ["arm", "final loss, nats per token", "each seed", "difference", "95% interval", OWN_SCATTER, "result"]
    columns += [TOKEN_FACTOR, LATE_TRAINING]
    hidden = ["result"] if panel.spec.claims else []  # the verdicts of claims are by one-sided tests
    if not any(pair.difference.alone for pair in pairs.values()):
        hidden.append(OWN_SCATTER)
    kept = [i for i, column in enumerate(columns) if column not in hidden]
    return [columns[i] for i in kept], [[row[i] for i in kept] for row in rows]


def _late_train_loss(arm: Arm) -> str:
    losses = [loss for run in arm.runs if (loss := run.late_train_loss) is not None]
    return f"{np.mean(losses):.4f}" if losses else ""


def _scalar_table(panel: Panel) -> tuple[list[str], list[list[str]]]:
    rows = []
    for arm in sorted(panel.arms, key=lambda arm: not arm.baseline):
        ends = [run.curve(panel.spec.tag).values[-1] for run in arm.runs if panel.spec.tag in run.curves]
        if ends and min(ends) > 0:
            rows.append([arm.name, f"{np.exp(np.log(ends).mean()):.4g}", ", ".join(f"{x:.4g}" for x in ends)])
    return ["arm", f"{panel.spec.tag} at the end, geometric mean", "each seed"] if rows else [], rows


def _laws(panel: Panel) -> list[tuple[Series, Series, ScalingFit]]:
    """Return (series, series of the baseline, fit of both) per series and form of the law."""
    base, (fits, _) = panel.baseline, panel.fits
    return [(series, base, fit) for series in panel.series if base for fit in fits.get(series.label, ())]


def _law_table(panel: Panel) -> tuple[list[str], list[list[str]]]:
    laws = _laws(panel)
    if not laws:
        return [], []
    rows = [
        [
            series.name,
            fit.b.formula(),
            fit.a.formula(),
            f"{fit.offset.mean:+.4f} ({_interval(fit.offset.low, fit.offset.high)})",
            f"{fit.slope.mean:+.4f} ({_interval(fit.slope.low, fit.slope.high)})",
            f"{fit.residual:.4f}",
        ]
        for series, _, fit in laws
    ]
    offset = "offset in the middle of the sizes, nats per token (95% interval)"
    slope = "slope difference, above 0: falls faster (95% interval)"
    return ["arm", "law", f"law of {laws[0][1].label}", offset, slope, "residual, nats per token"], rows


def ours_words(verdict: Verdict) -> str:
    """Return the estimate of a claim and its interval, with its part if it has several, and its unit."""
    if verdict.estimate is None:
        return "not measured"
    part = f"{verdict.part}: " if verdict.part else ""
    pairs = f"{percent(verdict.confidence)}, {count_pairs(verdict.n)}"
    if verdict.own_low is not None:
        pairs += f"; by their own scatter {_interval(verdict.own_low, verdict.own_high)}"
    if verdict.unit == "times":
        ends = " to ".join(times(end) for end in (verdict.low, verdict.high) if end is not None) or "no interval"
        return f"{part}{times(verdict.estimate)} times ({ends}; {pairs})"
    unit = "" if verdict.unit == "nats per token" else f" {verdict.unit}"
    return f"{part}{verdict.estimate:+.4f}{unit} ({_interval(verdict.low, verdict.high)}; {pairs})"


def p_words(verdict: Verdict) -> str:
    """Return the p value and the corrected one: `0.004; 0.03 of the primary claims`."""
    if verdict.p is None or verdict.p_corrected is None:
        return ""
    claims = "the primary claims" if verdict.primary else "all others"
    return f"{verdict.p:.2g}; {verdict.p_corrected:.2g} of {claims}"


def _interval(low: float | None, high: float | None) -> str:
    return "no interval" if low is None or high is None else f"{low:+.4f} to {high:+.4f}"


def measured(arms: Sequence[Arm]) -> bool:
    """Return whether all runs of the arms measured copying."""
    runs = [run for arm in arms for run in arm.runs]
    return bool(runs) and all(GAIN in run.curves for run in runs)


def parts_of(a: Arm, b: Arm) -> dict[str, PairedDifference]:
    """Split B - A of paired runs by kind of token: share of the kind times difference of its mean losses.

    The parts add up to the difference on the measured sequences, a part of those of val/loss.
    """
    found = {}
    for kind in TOKEN_KINDS:
        first, second = (
            [_share(run, kind) * float(run.curve(COPYING + kind).values[-1]) for run in each.runs] for each in (a, b)
        )
        found[kind] = paired_difference(first, second)
    return found


def copying_table(panel: Panel) -> tuple[list[str], list[list[str]]]:
    """Return header and rows: loss by kind, gain on a second copy, when the circuit forms, parts of the difference."""
    arms = sorted(panel.arms, key=lambda arm: not arm.baseline)
    base = arms[0] if arms[0].baseline else None
    shares = {kind: _share(arms[0].runs[0], kind) for kind in TOKEN_KINDS}
    columns = ["arm", *(f"{kind}, {share:.0%} of tokens" for kind, share in shares.items())]
    columns += ["second copy − first", "circuit forms after, M tokens"]
    columns += [f"difference by {kind}" for kind in TOKEN_KINDS] if base else []
    rows = []
    for arm in arms:
        tags = [COPYING + kind for kind in (*TOKEN_KINDS, "second_minus_first")]
        ends = [np.mean([run.curve(tag).values[-1] for run in arm.runs]) for tag in tags]
        formed = [tokens_to_reach(*run.curve(GAIN), FORMED) for run in arm.runs]
        times = ", ".join("never" if at is None else f"{at / 1e6:.2f}" for at in formed)
        row = [arm.name, *(f"{end:.3f}" for end in ends), times]
        if base:
            parts = {} if arm is base else parts_of(*panel.paired(base, arm))
            row += [f"{parts[kind].mean:+.4f}" if parts else "" for kind in TOKEN_KINDS]
        rows.append(row)
    return columns, rows


def _share(run: Run, kind: str) -> float:
    if kind == "unseen":
        return 1 - sum(_share(run, other) for other in TOKEN_KINDS[:-1])
    return float(run.curve(f"{COPYING}{kind}_share").values[-1])
