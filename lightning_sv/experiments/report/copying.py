"""Copying from the context: the table of a panel, and the parts of a difference by kind of token."""

from collections.abc import Sequence

import numpy as np

from lightning_sv.experiments.arms import Arm, baseline_first
from lightning_sv.experiments.kinds.base import LoadedPanel, TextTable
from lightning_sv.runs.events import Run
from lightning_sv.runs.tags import COPYING
from lightning_sv.statistics.paired import PairedDifference, paired_difference, tokens_to_reach

#: kinds of tokens in `callbacks.copying.token_kinds`
TOKEN_KINDS = ("repeat", "seen", "unseen")
GAIN = f"{COPYING}second_minus_first"
#: nats per token; loss on the second copy of a text minus that on the first, below which the circuit counts as formed
FORMED = -0.5


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


def copying_table(panel: LoadedPanel) -> TextTable:
    """Return header and rows: loss by kind, gain on a second copy, when the circuit forms, parts of the difference."""
    arms = baseline_first(panel.arms)
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
    return TextTable(columns, rows)


def _share(run: Run, kind: str) -> float:
    if kind == "unseen":
        return 1 - sum(_share(run, other) for other in TOKEN_KINDS[:-1])
    return float(run.curve(f"{COPYING}{kind}_share").values[-1])
