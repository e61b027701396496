"""A run that is to be had: everything that decides it, and the name that follows from that.

Two arms that come to the same configuration have the same key, so they are trained once.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

#: share of a GPU's peak that hours are given for; the middle of `lightning_sv.plan.MFUS`
MFU = 0.4


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the runs of an arm but their seed.

    Args:
        model: name of the model
        strategy: label of the strategy
        details: optimizer, schedule and the values that differ from the model's file, for a reader
        args: of `fit`, without seed and directory
        identity: the configuration as JSON: all that its YAML and arguments say, without the defaults of the code
        steps: optimizer steps
        tokens: training tokens
        parameters: activated parameters
        seconds: of one core; None on a GPU
        gpu_hours: at `MFU`; None on a CPU
        title: what a reader sees of its runs
        note: what a reader of the losses of its model must know
    """

    model: str
    strategy: str
    details: str
    args: tuple[str, ...]
    identity: str
    steps: int
    tokens: int
    parameters: int
    seconds: float | None
    gpu_hours: float | None
    title: str
    note: str = ""

    @property
    def tokens_per_param(self) -> float:
        """Training tokens per activated parameter; 100 in the paper."""
        return self.tokens / self.parameters

    def key(self, seed: int) -> str:
        """Name of the run's directory: readable, and a hash of what decides the result."""
        digest = hashlib.sha256(f"{self.identity} {seed}".encode()).hexdigest()[:10]
        return re.sub(r"[^\w.+-]+", "_", f"{self.model}-{self.strategy}-seed{seed}-{digest}")


#: a run that is to be had: what is trained, on which seed
Wanted = tuple[Recipe, int]


def by_seed(wanted: Iterable[Wanted]) -> list[Wanted]:
    """Each run once, in order of the seeds, so that a stop leaves whole pairs."""
    unique = {recipe.key(seed): (recipe, seed) for recipe, seed in wanted}
    return sorted(unique.values(), key=lambda run: run[1])
