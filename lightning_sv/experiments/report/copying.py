"""Copying from the context in a report: the loss by kind of token, what each kind adds to a difference, the circuit."""

from collections.abc import Sequence

import numpy as np

from lightning_sv.analysis.paired import PairedDifference, paired_difference, tokens_to_reach
from lightning_sv.experiments.results import Arm, Panel
from lightning_sv.runs.events import COPYING, Run

#: kinds of token, as `callbacks.copying.TokenKinds` has them
KINDS = ("repeat", "seen", "unseen")
GAIN = f"{COPYING}second_minus_first"
#: nats per token by which the second copy of a text must be better for the circuit to count as formed
FORMED = -0.5


def measured(arms: Sequence[Arm]) -> bool:
    """Whether all runs of the arms, at least one, measured copying."""
    runs = [run for arm in arms for run in arm.runs]
    return bool(runs) and all(GAIN in run.curves for run in runs)


def parts_of(base: Arm, arm: Arm) -> dict[str, PairedDifference]:
    """Split the mean loss of `arm` minus that of `base` by kind: share of the kind times the difference of its means.

    The parts add up to the difference on the measured sequences, which are fewer than those of val/loss.
    """
    a, b = base.paired(arm)
    found = {}
    for kind in KINDS:
        first, second = ([_part(run, kind) for run in each.runs] for each in (a, b))
        found[kind] = paired_difference(first, second)
    return found


def copying_table(panel: Panel) -> tuple[list[str], list[list[str]]]:
    """Return header and rows: loss by kind, gain on a second copy, when the circuit forms, parts of the difference."""
    arms = sorted(panel.arms, key=lambda arm: not arm.baseline)
    base = arms[0] if arms[0].baseline else None
    shares = {kind: _share(arms[0].runs[0], kind) for kind in KINDS}
    columns = ["arm", *(f"{kind}, {share:.0%} of tokens" for kind, share in shares.items())]
    columns += ["second copy − first", "circuit forms after, M tokens"]
    columns += [f"difference by {kind}" for kind in KINDS] if base else []
    rows = []
    for arm in arms:
        ends = [
            np.mean([run.curve(COPYING + kind).values[-1] for run in arm.runs])
            for kind in (*KINDS, "second_minus_first")
        ]
        formed = [tokens_to_reach(*run.curve(GAIN), FORMED) for run in arm.runs]
        times = ", ".join("never" if at is None else f"{at / 1e6:.2f}" for at in formed)
        row = [arm.name, *(f"{end:.3f}" for end in ends), times]
        if base:
            parts = {} if arm is base else parts_of(base, arm)
            row += [f"{parts[kind].mean:+.4f}" if parts else "" for kind in KINDS]
        rows.append(row)
    return columns, rows


def _share(run: Run, kind: str) -> float:
    if kind == "unseen":
        return 1 - sum(_share(run, other) for other in KINDS[:-1])
    return float(run.curve(f"{COPYING}{kind}_share").values[-1])


def _part(run: Run, kind: str) -> float:
    return _share(run, kind) * float(run.curve(COPYING + kind).values[-1])
