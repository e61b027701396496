"""Claims of the paper, their checks and results."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from lightning_sv.theory.panels import Panel

Advance = Callable[[float], None]
T = TypeVar("T")
Verdict = Literal["holds", "fails, as expected", "CONTRADICTED"]


def counted(items: Sequence[T], advance: Advance) -> Iterator[T]:
    """Yield the items, and report the completed fraction after each."""
    for done, item in enumerate(items, 1):
        yield item
        advance(done / len(items))


@dataclass(frozen=True)
class Finding:
    """Result of a check.

    Args:
        stated: the paper's number, or its inequality in a few characters
        measured: our number
        error: difference of the two, or the uncertainty of ours; None if neither is meaningful
        agrees: True if the measurement confirms the statement
        note: one line of details
        panels: panels of the picture
    """

    stated: float | str
    measured: float
    error: float | None
    agrees: bool
    note: str = ""
    panels: tuple[Panel, ...] = ()


@dataclass(frozen=True)
class Claim:
    """A statement that can be checked.

    Args:
        claim: name of the theorem on the command line
        part: part of the theorem
        source: place in the paper
        statement: the statement as a formula
        conditions: conditions of this check
        check: function that measures; called with a progress function of the completed fraction
        expected: 'holds', or 'fails' for a limit: a statement with a known counterexample
    """

    claim: str
    part: str
    source: str
    statement: str
    conditions: str
    check: Callable[[Advance], Finding]
    expected: Literal["holds", "fails"] = "holds"

    def run(self, advance: Advance = lambda share: None) -> "Result":
        """Run the check."""
        return Result(self, self.check(advance))


@dataclass(frozen=True)
class Result:
    """A claim with its finding."""

    claim: Claim
    finding: Finding

    @property
    def verdict(self) -> Verdict:
        """Verdict: as the paper states, an expected failure, or the opposite of the expectation."""
        if self.finding.agrees != (self.claim.expected == "holds"):
            return "CONTRADICTED"
        return "holds" if self.finding.agrees else "fails, as expected"

    def to_dict(self) -> dict[str, Any]:
        """Return everything except the check and the pictures, for JSON."""
        claim, finding = self.claim, self.finding
        return {
            "claim": claim.claim,
            "part": claim.part,
            "source": claim.source,
            "statement": claim.statement,
            "conditions": claim.conditions,
            "stated": finding.stated,
            "measured": finding.measured,
            "error": finding.error,
            "verdict": self.verdict,
            "expected": claim.expected,
            "note": finding.note,
        }
