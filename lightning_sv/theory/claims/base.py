"""What a claim is: a statement of the paper, a check of it, and what the check found."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from lightning_sv.theory.panels import Panel

Advance = Callable[[float], None]
Verdict = Literal["holds", "fails, as expected", "CONTRADICTED"]


@dataclass(frozen=True)
class Finding:
    """What a check measured.

    Args:
        stated: The paper's number, or its inequality in a few characters.
        measured: Ours.
        error: Difference of the two, or the uncertainty of ours; None where neither means anything.
        agrees: Whether the statement is true of what was measured.
        note: One line with what the numbers alone do not say.
        panels: Pictures.
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
        claim: Word that names the theorem on the command line.
        part: Which part of it.
        source: Where the paper says it.
        statement: In a formula.
        conditions: Under which it is checked here.
        check: Measures; called with a function that takes the share done.
        expected: 'holds', or 'fails' for a limit: a statement whose counterexample is the point.
    """

    claim: str
    part: str
    source: str
    statement: str
    conditions: str
    check: Callable[[Advance], Finding]
    expected: Literal["holds", "fails"] = "holds"

    def run(self, advance: Advance = lambda share: None) -> "Result":
        """Check it."""
        return Result(self, self.check(advance))


@dataclass(frozen=True)
class Result:
    """A claim with what was found."""

    claim: Claim
    finding: Finding

    @property
    def verdict(self) -> Verdict:
        """One of three: as the paper says, a limit that shows, or the opposite of what is expected."""
        if self.finding.agrees != (self.claim.expected == "holds"):
            return "CONTRADICTED"
        return "holds" if self.finding.agrees else "fails, as expected"

    def to_dict(self) -> dict[str, Any]:
        """Everything but the check and the pictures, for JSON."""
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
