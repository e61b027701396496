"""Pairs of the baseline and one other arm of a panel."""

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from lightning_sv.experiments.arms import Arm
from lightning_sv.experiments.claims.pooling import TWO_SIDED
from lightning_sv.statistics.paired import PairedDifference, TokenEfficiency, token_efficiency
from lightning_sv.statistics.verdicts import difference_sentence, direction, tokens_sentence


@dataclass(frozen=True, eq=False)
class Pair:
    """The baseline A and one other arm B on the seeds that they share; differences are B - A."""

    a: Arm
    b: Arm
    difference: PairedDifference

    @cached_property
    def efficiency(self) -> TokenEfficiency:
        """Tokens of both arms to the higher one of their final losses."""
        return token_efficiency(self.a.curves, self.b.curves, TWO_SIDED)

    @property
    def verdict_sentence(self) -> str:
        """Sentence on the difference of their final losses."""
        return difference_sentence(self.a.label, self.b.label, self.difference)

    @property
    def efficiency_sentence(self) -> str:
        """Sentence on the ratio of their tokens."""
        return tokens_sentence(self.a.label, self.b.label, self.efficiency, TWO_SIDED)

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers of the pair as JSON types."""
        d = self.difference
        e = self.efficiency
        word = direction(d)
        resolved = word in ("lower", "higher")
        return {
            "b": self.b.label,
            "sentence": self.verdict_sentence,
            "tokens_sentence": self.efficiency_sentence,
            "difference": {
                **asdict(d),
                "verdict": f"B {word}" if resolved else word,
                "resolved": resolved,
                "smallest_resolvable": d.smallest_resolvable,
                "seeds": list(self.a.seeds),
                "per_seed": (self.b.losses - self.a.losses).tolist(),
            },
            "tokens_to_higher_final_loss": {**asdict(e), "n": e.n},
        }
