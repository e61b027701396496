"""Learning-rate schedules: pure functions of the step."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from lightning_sv.errors import expect, expect_types
from lightning_sv.own_code import find


@dataclass(frozen=True)
class ScheduleConfig:
    """Linear warm-up, followed by the schedule `name` (paper, Appendix B.1).

    Attributes:
        name: 'cos': cosine from the peak to `final_ratio` times the peak at the last step; 'wsd':
            constant until `stable_ratio` of all steps, then linear, see `stable_then_linear`; or
            'package.module:Name' of your own function, see `SCHEDULES`
        warmup_ratio: fraction of the steps spent in linear warm-up (not stated in the paper)
        final_ratio: learning rate over the peak at the last step of cos, or one step after the last
            of wsd; null for the paper's values, 1/20 for cos and 0 for wsd
        stable_ratio: fraction of all steps, including warm-up, after which wsd decays; not used by
            cos
    """

    name: str = "cos"
    warmup_ratio: float = 0.01
    final_ratio: float | None = None
    stable_ratio: float = 0.8

    def __post_init__(self) -> None:
        expect_types("model.schedule", self)
        if ":" not in self.name:
            find(SCHEDULES, self.name, "model.schedule.name")
        for key in ("warmup_ratio", "final_ratio"):
            value = getattr(self, key)
            fits = value is None or 0 <= value < 1
            expect(fits, f"model.schedule.{key}", value, "a number in [0, 1).")
        stable = self.stable_ratio
        expect(0 <= stable <= 1, "model.schedule.stable_ratio", stable, "a number in [0, 1].")
        if self.name == "wsd":
            expected = f"at most stable_ratio {stable}, the start of the decay."
            is_ordered = self.warmup_ratio <= stable
            expect(is_ordered, "model.schedule.warmup_ratio", self.warmup_ratio, expected)

    @property
    def final(self) -> float:
        """`final_ratio`; if it is null, 1/20 for cos and 0 for every other schedule."""
        if self.final_ratio is not None:
            return self.final_ratio
        if self.name == "cos":
            return 0.05
        return 0.0

    def warmup_steps(self, total_steps: int) -> int:
        """Return the number of steps before the first one at the peak."""
        return round(self.warmup_ratio * total_steps)

    def factor(self, step: int, total_steps: int) -> float:
        """Return the learning rate over its peak at `step`, 0 <= step < total_steps."""
        warmup = self.warmup_steps(total_steps)
        if step < warmup:
            return (step + 1) / (warmup + 1)
        schedule = find(SCHEDULES, self.name, "model.schedule.name")
        return schedule(step, total_steps, self)


def cosine(step: int, total_steps: int, config: ScheduleConfig) -> float:
    """Return final + (1 - final) (1 + cos(pi p)) / 2.

    p grows from 0 after warm-up to 1 at the last step.
    """
    warmup = config.warmup_steps(total_steps)
    final = config.final
    progress = min(1.0, (step - warmup) / max(1, total_steps - 1 - warmup))
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))


def stable_then_linear(step: int, total_steps: int, config: ScheduleConfig) -> float:
    """Return 1 up to step s = stable_ratio total, then a linear decay.

    final + (1 - final) (total - step) / (total - s). Warmup-stable-decay (paper, Appendix B.1.2;
    arXiv:2404.06395). `final` would be reached at step `total`, after the last step total - 1: with
    final = 0 its learning rate is 1 / (total - s).
    """
    stable = round(config.stable_ratio * total_steps)
    if step <= stable:
        return 1.0
    return config.final + (1 - config.final) * (total_steps - step) / (total_steps - stable)


#: name -> factor(step, total_steps, config) after warm-up
SCHEDULES: dict[str, Callable[[int, int, ScheduleConfig], float]] = {
    "cos": cosine,
    "wsd": stable_then_linear,
}
