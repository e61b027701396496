"""Copying from the context: table of a panel, and parts of a difference by kind of token."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from lightning_sv.experiments.arms import Arm, baseline_first, runs_of
from lightning_sv.experiments.kinds.base import LoadedPanel
from lightning_sv.runs.events import Run
from lightning_sv.runs.tags import COPYING
from lightning_sv.statistics.paired import PairedDifference, paired_difference, tokens_to_reach

#: kinds of tokens in `callbacks.copying.token_kinds`
TOKEN_KINDS = ("repeat", "seen", "unseen")
GAIN = f"{COPYING}second_minus_first"
#: nats per token; loss on the second copy of a text minus that on the first, below which the
#: circuit counts as formed
FORMED = -0.5
NOTE = (
    "Final loss in nats per token of tokens that repeat a pair of their context, of those seen in "
    "it otherwise, and of the rest; mean of the seeds. The parts of a difference are share times "
    "difference of a kind. They add up to the difference on the measured sequences. The circuit "
    "counts as formed when a text is predicted better by 0.5 nats per token on its second reading; "
    "one time per seed."
)


def measured_copying(arms: Sequence[Arm]) -> bool:
    """Return whether all runs of the arms measured copying."""
    runs = runs_of(arms)
    return bool(runs) and all(GAIN in run.curves for run in runs)


def parts_of(a: Arm, b: Arm) -> dict[str, PairedDifference]:
    """Split B - A of paired runs by kind of token: its share times the difference of its losses.

    The parts add up to the difference on the measured sequences, a part of those of val/loss.
    """
    parts = {}
    for kind in TOKEN_KINDS:
        parts[kind] = paired_difference(_shares_of_loss(b, kind), _shares_of_loss(a, kind))
    return parts


def copying_table(panel: LoadedPanel) -> pd.DataFrame:
    """Return per arm: loss by kind, gain on a second copy, when the circuit forms, parts."""
    arms = baseline_first(panel.arms)
    measured = arms[0].runs[0]
    rows = {arm.label: _row(arm, measured) for arm in arms}
    for pair in panel.pairs:
        parts = parts_of(pair.a, pair.b)
        texts = {f"difference by {kind}": f"{part.mean:+.4f}" for kind, part in parts.items()}
        rows[pair.b.label] |= texts
    return pd.DataFrame(list(rows.values())).fillna("")


def _row(arm: Arm, measured: Run) -> dict[str, str]:
    """Return the row of an arm; the headings have the shares of the tokens that a run measured."""
    row = {"arm": arm.name}
    for kind in TOKEN_KINDS:
        heading = f"{kind}, {_share(measured, kind):.0%} of tokens"
        row[heading] = f"{_mean_end(arm, COPYING + kind):.3f}"
    row["second copy − first"] = f"{_mean_end(arm, GAIN):.3f}"
    row["circuit forms after, M tokens"] = ", ".join(map(_time_formed, arm.runs))
    return row


def _mean_end(arm: Arm, tag: str) -> float:
    """Return the mean over the runs of the last value of a scalar."""
    return float(np.mean([run.curve(tag).values[-1] for run in arm.runs]))


def _time_formed(run: Run) -> str:
    tokens = tokens_to_reach(*run.curve(GAIN), FORMED)
    if tokens is None:
        return "never"
    return f"{tokens / 1e6:.2f}"


def _shares_of_loss(arm: Arm, kind: str) -> list[float]:
    """Return per run the share of a kind times its final mean loss."""
    return [_share(run, kind) * float(run.curve(COPYING + kind).values[-1]) for run in arm.runs]


def _share(run: Run, kind: str) -> float:
    if kind == "unseen":
        return 1 - sum(_share(run, other) for other in TOKEN_KINDS[:-1])
    return float(run.curve(f"{COPYING}{kind}_share").values[-1])
