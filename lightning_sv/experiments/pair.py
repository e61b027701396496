"""One arm against the baseline, in pairs that share a seed: the difference, the tokens, the verdict.

All losses are the last ``val/loss`` of the runs' event files, nats per token.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lightning_sv.analysis.decision import difference_sentence, tokens_sentence
from lightning_sv.analysis.paired import (
    PairedDifference,
    TokenEfficiency,
    paired_difference,
    token_efficiency,
)
from lightning_sv.runs.events import VAL_LOSS, Curve, Run


@dataclass(frozen=True)
class Arm:
    """One strategy of a comparison.

    Args:
        label: What the table and the chart call it, e.g. ``unified``.
        scale: The value of ``--model.scale``.
        args: Further arguments for this arm alone, e.g. ``("--model.optim.lr", "3e-3")``.
    """

    label: str
    scale: str
    args: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class TrainedArm:
    """An arm and its completed runs.

    Args:
        arm: The arm as it was asked for.
        runs: One run per seed, every arm of a comparison in the same order of seeds.
    """

    arm: Arm
    runs: tuple[Run, ...]

    @property
    def label(self) -> str:
        """The arm's label."""
        return self.arm.label

    @property
    def losses(self) -> list[float]:
        """Final validation losses, nats per token, one per seed."""
        return [run.val_loss for run in self.runs]

    @property
    def mean_loss(self) -> float:
        """Mean of the final validation losses, nats per token."""
        return float(np.mean(self.losses))

    @property
    def curves(self) -> list[Curve]:
        """Validation losses against training tokens, one curve per seed."""
        return [run.curve(VAL_LOSS) for run in self.runs]

    def to_dict(self) -> dict[str, Any]:
        """What was asked for and the losses it ended with; plain JSON types."""
        return {**asdict(self.arm), "val_loss": self.mean_loss, "val_loss_per_seed": self.losses}


@dataclass(frozen=True, eq=False)
class Pair:
    """The baseline A and one other arm B; differences are B - A.

    Args:
        a: The arm compared with.
        b: The arm in question, on the same seeds.
        confidence: Coverage of the intervals.
    """

    a: TrainedArm
    b: TrainedArm
    confidence: float = 0.95

    @property
    def title(self) -> str:
        """What the difference is called, e.g. ``unified - llama``."""
        return f"{self.b.label} - {self.a.label}"

    @property
    def per_seed(self) -> list[float]:
        """B - A of every seed, nats per token."""
        return [y - x for x, y in zip(self.a.losses, self.b.losses, strict=True)]

    @property
    def difference(self) -> PairedDifference:
        """B - A, nats per token."""
        return paired_difference(self.a.losses, self.b.losses, self.confidence)

    @property
    def efficiency(self) -> TokenEfficiency:
        """Tokens each of the two needs for A's final loss."""
        return token_efficiency(self.a.curves, self.b.curves, self.confidence)

    def sentence(self) -> str:
        """The verdict as one plain sentence."""
        return difference_sentence(self.a.label, self.b.label, self.difference)

    def tokens_sentence(self) -> str:
        """How many tokens B needs for A's final loss, as one plain sentence."""
        return tokens_sentence(self.a.label, self.b.label, self.efficiency, self.confidence)

    def to_dict(self) -> dict[str, Any]:
        """Every figure of the pair; plain JSON types."""
        d, e = self.difference, self.efficiency
        return {
            "b": self.b.label,
            "sentence": self.sentence(),
            "tokens_sentence": self.tokens_sentence(),
            "difference": {
                **asdict(d),
                "verdict": d.verdict,
                "resolved": d.resolved,
                "smallest_resolvable": d.smallest_resolvable,
                "per_seed": self.per_seed,
            },
            "tokens_to_final_loss_of_a": {**asdict(e), "n": e.n, "reached": e.reached},
        }
