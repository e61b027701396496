"""What a claim is: a statement of the paper, a check of it, and what the check found."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from lightning_sv.theory.panels import Panel

Advance = Callable[[float], None]
T = TypeVar("T")
Verdict = Literal["holds", "fails, as expected", "CONTRADICTED"]


def counted(items: Sequence[T], advance: Advance) -> Iterator[T]:
    """Yield the items, and report after each the share that is done."""
    for done, item in enumerate(items, 1):
        yield item
        advance(done / len(items))


@dataclass(frozen=True)
class Finding:
    """What a check measured.

    Args:
        stated: the paper's number, or its inequality in a few characters
        measured: ours
        error: difference of the two, or the uncertainty of ours; None where neither means anything
        agrees: whether the statement is true of what was measured
        note: one line with what the numbers alone do not say
        panels: what its picture shows
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
        claim: word that names the theorem on the command line
        part: which part of it
        source: where the paper says it
        statement: in a formula
        conditions: under which it is checked here
        check: measures; called with a function that takes the share done
        expected: 'holds', or 'fails' for a limit: a statement whose counterexample is the point
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
