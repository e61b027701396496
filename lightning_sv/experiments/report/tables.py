"""Numbers of a report as rows of runs, differences and claims, and the CSV files."""

import csv
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_sv.atomic import atomic_path, check_writable
from lightning_sv.errors import ConfigError
from lightning_sv.experiments.arms import Arm, baseline_first
from lightning_sv.experiments.kinds.base import LoadedPanel
from lightning_sv.experiments.report.differences import DIFFERENCE, differences_of
from lightning_sv.experiments.results import Figure, Verdict
from lightning_sv.json_text import json_text
from lightning_sv.runs.events import LATE_TRAIN_LOSS, Run
from lightning_sv.runs.results_csv import RESULTS, curve_text, plain_cell, read_csv
from lightning_sv.runs.tags import COPYING, VAL_LOSS
from lightning_sv.statistics.paired import percent
from lightning_sv.statistics.verdicts import count_pairs, interval_text, times

PAPER_TOKENS_PER_PARAM = 100
#: files of the report
PAGES = ("report.md", "report.html")
_SUMMARY = (
    "steps", "parameters", "activated_parameters", "lr", "seconds", "corpus_hash", "tokenizer_sha256", "torch",
    "commit", "date", "machine",
)  # fmt: skip
# beginnings of the tags of `TrainingMonitor` and `RelativeSteps` that have a column
_CLIPPED = "clipped_steps"
_ROLE_STEP = "relative_step/role/"
_OF_STEPS = (_CLIPPED, _ROLE_STEP, "relative_step/mean/")


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
            "kind": panel.spec.kind,
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


def steps_table(panel: LoadedPanel) -> tuple[list[str], list[list[str]]]:
    """Return header and rows: share of clipped steps and relative step per role; empty if no run measured them."""
    arms = baseline_first(panel.arms)
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
    """Return one row per difference to a baseline, see `differences_of`."""
    rows = []
    for figure in figures:
        for panel in figure.panels:
            place = {"figure": figure.spec.name, "panel": panel.title}
            for row in differences_of(panel):
                rows.append(place | dict(zip(DIFFERENCE, row, strict=True)))
    return rows


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


def ours_words(verdict: Verdict) -> str:
    """Return the estimate of a claim and its interval, with its part if it has several, and its unit."""
    if verdict.estimate is None:
        return "not measured"
    part = f"{verdict.part}: " if verdict.part else ""
    pairs = f"{percent(verdict.confidence)}, {count_pairs(verdict.n)}"
    if verdict.own_low is not None:
        pairs += f"; by their own scatter {interval_text(verdict.own_low, verdict.own_high)}"
    if verdict.unit == "times":
        ends = " to ".join(times(end) for end in (verdict.low, verdict.high) if end is not None) or "no interval"
        return f"{part}{times(verdict.estimate)} times ({ends}; {pairs})"
    unit = "" if verdict.unit == "nats per token" else f" {verdict.unit}"
    return f"{part}{verdict.estimate:+.4f}{unit} ({interval_text(verdict.low, verdict.high)}; {pairs})"


def p_words(verdict: Verdict) -> str:
    """Return the p value and the corrected one: `0.004; 0.03 of the primary claims`."""
    if verdict.p is None or verdict.p_corrected is None:
        return ""
    claims = "the primary claims" if verdict.primary else "all others"
    return f"{verdict.p:.2g}; {verdict.p_corrected:.2g} of {claims}"
