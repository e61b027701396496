"""Differences of two arms with the scatter of all comparable runs.

The arms of a panel that train on equally many tokens of one text are pooled, and so are pools of a
figure that share an arm. Each size of a scaling panel has its own pool, and so has each grid. Other
figures have no influence, so that a figure has the same numbers alone and in a recording of
several.
"""

import math
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

import numpy as np

from lightning_sv.errors import NotTestableError
from lightning_sv.runs.events import Run
from lightning_sv.statistics.block_anova import BlockDesign
from lightning_sv.statistics.paired import PairedDifference

#: keys of a summary that define the unit of losses
CORPUS_KEYS = ("corpus_hash", "tokenizer_sha256")
#: coverage of intervals of comparisons without a direction
TWO_SIDED = 0.95


@dataclass(frozen=True)
class LossAt:
    """Validation loss of a run at a share of its tokens, linear between evaluations.

    Losses before the end, and changes, are those on the same sequences: a last loss of more
    sequences would differ from an earlier one by these too, at all seeds alike. If a run has such a
    last loss, a change ends at the validation before it.

    Args:
        share: share above 0 and at most 1; 1 for the last loss
        since: earlier share, whose loss is subtracted; None for the loss itself
    """

    share: float = 1.0
    since: float | None = None

    def __call__(self, run: Run) -> float:
        """Return the loss, nats per token.

        Raises:
            NotTestableError: the run has no validation before, or none after `since`
        """
        if self.since is not None:
            return _change(run, self.since, self.share)
        if self.share == 1.0:
            return run.val_loss
        return _loss_on_same_sequences(run, self.share)


FINAL = LossAt()


def _change(run: Run, since: float, until: float) -> float:
    """Return the loss at a share of the tokens minus that at an earlier one."""
    last = run.losses_on_same_sequences.tokens[-1]
    if since * run.tokens >= last:
        found = f"{run.dir} has no validation of equal sequences after {last:,} tokens"
        raise NotTestableError(f"{found}; set data.validations, or a different share in the claim.")
    return _loss_on_same_sequences(run, until) - _loss_on_same_sequences(run, since)


def _loss_on_same_sequences(run: Run, share: float) -> float:
    curve = run.losses_on_same_sequences
    at = share * run.tokens
    if at < curve.tokens[0]:
        hint = f"only from {curve.tokens[0]:,} on; "
        hint += "set data.validations, or a different share in the claim."
        raise NotTestableError(f"{run.dir} has no validation loss around {at:,.0f} tokens, {hint}")
    return float(np.interp(at, curve.tokens, curve.values))


class Pool:
    """Runs of one figure, grouped into arms that share their scatter.

    All panels are added before the first difference is computed.
    """

    def __init__(self) -> None:
        self._runs: dict[Hashable, dict[int, Run]] = {}  # arm -> seed -> run
        self._group_of: dict[Hashable, frozenset[Hashable]] = {}
        self._designs: dict[tuple[frozenset[Hashable], Callable[[Run], float]], BlockDesign] = {}

    def add(self, arms: Mapping[Hashable, Mapping[int, Run]]) -> None:
        """Add arms that a panel compares: arm -> seed -> run.

        Those with equal tokens of one text share a group. An arm of two panels joins their groups.
        """
        arms_by_training: dict[Hashable, list[Hashable]] = {}
        for arm, runs in arms.items():
            self._runs.setdefault(arm, {}).update(runs)
            first = next(iter(runs.values()))
            text = tuple(map(first.summary.get, CORPUS_KEYS))
            arms_by_training.setdefault((first.tokens, text), []).append(arm)
        for equally_trained in arms_by_training.values():
            groups = [self._group_of.get(arm, {arm}) for arm in equally_trained]
            group = frozenset(chain.from_iterable(groups))
            self._group_of |= dict.fromkeys(group, group)

    def runs(self, arm: Hashable) -> Mapping[int, Run]:
        """Return the runs of an arm by seed; empty if no panel has added it."""
        return self._runs.get(arm, {})

    def difference(
        self, a: Hashable, b: Hashable, of: Callable[[Run], float], confidence: float
    ) -> PairedDifference:
        """A - B with the scatter of their group.

        In different groups it is that of the two arms alone.

        Args:
            a: key of the arm A
            b: key of the arm B
            of: value of a run
            confidence: coverage of the interval

        Raises:
            NotTestableError: a run of the two diverged or lacks the value
        """
        for run in (*self._runs[a].values(), *self._runs[b].values()):
            if not math.isfinite(of(run)):
                raise NotTestableError(f"{run.dir} diverged; leave it out or repair it.")
        group = self._group_of[a]
        if b not in group:
            group = frozenset([a, b])
        if (group, of) not in self._designs:
            self._designs[group, of] = self._design(group, of)
        return self._designs[group, of].difference(a, b, confidence)

    def _design(self, group: frozenset[Hashable], of: Callable[[Run], float]) -> BlockDesign:
        # In the order of `_runs`: that of a set differs between processes, and with it the last
        # digit.
        values = {}
        for arm, runs in self._runs.items():
            if arm not in group:
                continue
            row = _read(runs, of)
            if row:
                values[arm] = row
        return BlockDesign(values)


def _read(runs: Mapping[int, Run], of: Callable[[Run], float]) -> dict[int, float]:
    """Return the finite values; other arms of the group may lack some."""
    found = {}
    for seed, run in runs.items():
        with suppress(NotTestableError):
            value = of(run)
            if math.isfinite(value):
                found[seed] = value
    return found
