"""Claims of the paper, their checks, results and plots.

Plots are data here; `plots.theory_plots` draws them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from lightning_sv.theory.series import Array

#: label of the x axis of most panels
TIME = "time t of the flow"


class Line(NamedTuple):
    """Points (x, y) as a line or marks."""

    label: str  #: label in the legend; "" for none
    x: Array | Sequence[float]  #: shape (N,)
    y: Array | Sequence[float]  #: shape (N,)
    marks: bool = False  #: if True, marks instead of a line
    spread: Array | None = None  #: half-width of a band, shape (N,)
    #: name in `plots.style.PALETTE` or of matplotlib; None for the next unused one
    colour: str | None = None


class Panel(NamedTuple):
    """Axes with a title, which is the statement that they show, and their lines."""

    title: str
    x: str  #: label of the x axis, with its unit
    y: str  #: label of the y axis, with its unit
    lines: Sequence[Line]
    scale: Literal["", "x", "y", "xy"] = ""  #: logarithmic axes
    level: float | None = None  #: height of a grey horizontal reference line
    limits: tuple[float, float] | None = None  #: limits of the y axis
    x_limits: tuple[float, float] | None = None


def ratio_panel(
    title: str, ours: str, theirs: str, lines: Sequence[Line], limits: tuple[float, float]
) -> Panel:
    """Return log-log axes for L_ours(t) / L_theirs(t), with TeX indices that may be empty."""
    ratio = f"${_loss_symbol(ours)} \\,/\\, {_loss_symbol(theirs)}$"
    return Panel(title, TIME, ratio, lines, scale="xy", level=1.0, limits=limits)


def _loss_symbol(index: str) -> str:
    return f"L_{{{index}}}(t)" if index else "L(t)"


@dataclass(frozen=True)
class Finding:
    """Result of a check."""

    stated: float | str  #: the paper's number, or its inequality in a few characters
    measured: float  #: our number
    #: difference of the two, or the uncertainty of ours; None if neither is meaningful
    error: float | None
    agrees: bool  #: True if the measurement confirms the statement
    note: str = ""  #: one line of details
    panels: tuple[Panel, ...] = ()  #: panels of the picture


@dataclass(frozen=True)
class Claim:
    """A statement that can be checked."""

    claim: str  #: name of the theorem on the command line
    source: str  #: place in the paper
    part: str  #: part of the theorem
    statement: str  #: the statement as a formula
    conditions: str  #: conditions of this check
    check: Callable[[], Finding]  #: function that measures
    #: 'fails' for a limit: a statement with a known counterexample
    expected: Literal["holds", "fails"] = "holds"


class Result(NamedTuple):
    """A claim with its finding."""

    claim: Claim
    finding: Finding

    @property
    def verdict(self) -> Literal["holds", "fails, as expected", "CONTRADICTED"]:
        """Verdict: as the paper states, an expected failure, or the opposite of the expectation."""
        if self.finding.agrees != (self.claim.expected == "holds"):
            return "CONTRADICTED"
        return "holds" if self.finding.agrees else "fails, as expected"

    def to_dict(self) -> dict[str, Any]:
        """Return everything except the check and the pictures, for JSON."""
        claim = self.claim
        finding = self.finding
        statement = {
            key: getattr(claim, key)
            for key in ("claim", "part", "source", "statement", "conditions")
        }
        figures = {key: getattr(finding, key) for key in ("stated", "measured", "error")}
        return {
            **statement,
            **figures,
            "verdict": self.verdict,
            "expected": claim.expected,
            "note": finding.note,
        }


def claim(
    name: str,
    source: str,
    part: str,
    conditions: str,
    expected: Literal["holds", "fails"] = "holds",
) -> Callable[[Callable[[], Finding]], Claim]:
    """Turn a check into a `Claim` with its docstring as statement; arguments as in `Claim`."""

    def make(check: Callable[[], Finding]) -> Claim:
        statement = " ".join((check.__doc__ or "").split()).removesuffix(".")
        return Claim(name, source, part, statement, conditions, check, expected)

    return make
