"""What one claim comes to: as it is decided, and as a report shows it."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from lightning_sv.analysis.paired import PairedDifference
from lightning_sv.analysis.verdicts import Finding, VerdictWord

#: whether an interval holds the paper's number
Agreement = Literal["", "consistent", "not consistent"]


class Estimate(NamedTuple):
    """What a claim is about, as the runs of a panel have it.

    Args:
        d: the figures
        detail: the sentence about them
        unit: of the figures
        part: what they are of, where it is not what the claim names, e.g. ``the final loss``
        sides: 2 where the error of the interval is that of both sides together, so that the opposite is no further
            question
        tested: what the claim's test is of, where it is not `d`: logarithms of a ratio
        finding: what it comes to, where the kind of claim has no test of its own
    """

    d: PairedDifference
    detail: str
    unit: str = "nats per token"
    part: str = ""
    sides: int = 1
    tested: PairedDifference | None = None
    finding: Finding | None = None


@dataclass(frozen=True)
class Verdict:
    """What the runs say about one claim.

    Args:
        claim: the statement in words, e.g. `unified ends below llama`
        verdict: one of five words; a claim of one pair is never more than `not resolved`
        sentence: the verdict with its numbers, as one plain sentence
        estimate: of what the claim is about; over pairs alone the mean of theirs
        low: lower end of its interval; None without one
        high: upper end
        n: number of pairs
        smallest: the smallest effect that this scatter and n resolve, half the interval; None without one
        paper: the paper's number or finding, as text
        panel: title of its panel
        unit: of the estimate and its interval; `times` is a ratio
        confidence: coverage of the interval; its ends are the bounds of one-sided tests at half the rest
        part: what the estimate is of, where it is not what the claim names
        p: one-sided p value of the word, times 5% over the error that its interval may make on that side, so that all
            compare with 5%; where nothing is resolved that of the nearest. None where nothing is tested
        df: degrees of freedom of the scatter
        primary: whether it is the first question of its figure
        p_corrected: p for all claims that were judged together: the primary ones among themselves, and the others
        corrected: the word that is left then
        paper_value: the paper's number for the estimate, where the runs are of its models and tokens
        agreement: whether the interval holds that number
        earlier: the words of earlier records, with their dates
        sides: 2 where p is of both sides together; 1 where the opposite of the claim is tested as well
    """

    claim: str
    verdict: VerdictWord
    sentence: str
    estimate: float | None
    low: float | None
    high: float | None
    n: int
    smallest: float | None
    paper: str
    panel: str = ""
    unit: str = "nats per token"
    confidence: float = 0.9
    part: str = ""
    p: float | None = None
    df: int | None = None
    primary: bool = False
    p_corrected: float | None = None
    corrected: VerdictWord | None = None
    paper_value: float | None = None
    agreement: Agreement = ""
    earlier: str = ""
    sides: int = 1
