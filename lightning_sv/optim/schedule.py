"""Learning-rate schedules: pure functions of the step."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ScheduleConfig:
    """Linear warm-up, then a decay (paper, Appendix B.1).

    Attributes:
        name: 'cos': cosine from the peak to `final_ratio` of it at the last step.
        warmup_ratio: share of the steps spent in linear warm-up (not stated in the paper).
        final_ratio: last learning rate over the peak; 1/20 in the paper.
    """

    name: str = "cos"
    warmup_ratio: float = 0.01
    final_ratio: float = 0.05

    def __post_init__(self) -> None:
        if self.name not in SCHEDULES:
            raise ValueError(f"model.schedule.name is {self.name!r}; known: {' '.join(SCHEDULES)}")
        for key in ("warmup_ratio", "final_ratio"):
            value = getattr(self, key)
            if not 0 <= value < 1:
                raise ValueError(f"model.schedule.{key} is {value}; it must be in [0, 1).")

    def factor(self, step: int, total_steps: int) -> float:
        """Learning rate over its peak at `step`, 0 <= step < total_steps."""
        warmup = round(self.warmup_ratio * total_steps)
        if step < warmup:
            return (step + 1) / (warmup + 1)
        progress = min(1.0, (step - warmup) / max(1, total_steps - 1 - warmup))
        return SCHEDULES[self.name](progress, self.final_ratio)


def cosine(progress: float, final_ratio: float) -> float:
    """Final + (1 - final) (1 + cos(pi p)) / 2 for p in [0, 1]."""
    return final_ratio + (1 - final_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


#: name -> factor(progress after warm-up in [0, 1], final_ratio)
SCHEDULES = {"cos": cosine}
