"""What became of a model to which a strategy was applied."""

from dataclasses import dataclass

from lightning_sv.scale import ScaleStrategy


@dataclass(frozen=True)
class Report:
    """What `apply_strategy` did.

    Attributes:
        strategy: the four axes
        vectors: names of the scale vectors that train now, as modules of the model
        notes: (name, what is not as the strategy has it there, and why)
        difference: largest difference of the outputs before and after, relative to the largest output
        same_function: the strategy keeps the function (all but `dnp`), and `difference` is rounding
    """

    strategy: ScaleStrategy
    vectors: tuple[str, ...]
    notes: tuple[tuple[str, str], ...]
    difference: float
    same_function: bool

    def __str__(self) -> str:
        kept = "the function is kept" if self.same_function else "the function is another one"
        head = f"{self.strategy}: {len(self.vectors)} scale vectors; {kept}, outputs differ by {self.difference:.1e}"
        return "\n".join([head, *(f"  {name}: {note}" for name, note in self.notes)])
