"""Pairs of the baseline and one other arm of a panel."""

from dataclasses import dataclass
from functools import cached_property

from lightning_sv.experiments.arms import Arm
from lightning_sv.experiments.claims.pooling import TWO_SIDED
from lightning_sv.statistics.paired import PairedDifference, TokenEfficiency, token_efficiency
from lightning_sv.statistics.verdicts import difference_sentence, tokens_sentence


@dataclass(frozen=True, eq=False)
class Pair:
    """The baseline A and one other arm B on the seeds that they share; differences are B - A."""

    a: Arm
    b: Arm
    difference: PairedDifference

    @cached_property
    def efficiency(self) -> TokenEfficiency:
        """Tokens of both arms to the higher one of their final losses."""
        a = self.a.curves_on_same_sequences
        b = self.b.curves_on_same_sequences
        return token_efficiency(a, b, TWO_SIDED)

    @property
    def verdict_sentence(self) -> str:
        """Sentence on the difference of their final losses."""
        return difference_sentence(self.a.label, self.b.label, self.difference)

    @property
    def efficiency_sentence(self) -> str:
        """Sentence on the ratio of their tokens."""
        return tokens_sentence(self.a.label, self.b.label, self.efficiency, TWO_SIDED)
