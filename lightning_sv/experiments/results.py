"""What a figure of the paper came to: arms, panels, verdicts. Plain data between the runs and the report."""

from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_sv.runs.events import Run

VerdictWord = Literal["holds", "contradicted", "not resolved", "not testable at this scale"]
PanelKind = Literal["curves", "scaling", "grid", "qkv", "table"]


@dataclass(frozen=True)
class Verdict:
    """What the runs say about one claim.

    Args:
        claim: The statement in words, e.g. ``unified ends below llama``.
        verdict: One of four words; a claim of one pair is never more than ``not resolved``.
        sentence: The verdict with its numbers, as one plain sentence.
        estimate: Mean over the pairs of what the claim is about.
        low: Lower end of its interval; None without one.
        high: Upper end.
        n: Number of pairs.
        smallest: The smallest effect that these pairs resolve, half their interval; None without one.
        paper: The paper's number or finding, as text.
        panel: Title of its panel.
        unit: Of the estimate and its interval; ``times`` is a ratio.
        confidence: Coverage of the interval; above 0.95 where one of several parts of a claim speaks against it.
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
    confidence: float = 0.95


@dataclass(frozen=True, eq=False)
class ArmResult:
    """One arm of a panel and its completed runs.

    Args:
        label: What table and chart call it.
        runs: One per seed; every arm of a panel has them in the same order of seeds.
        ours: Whether the arm is not the paper's.
        baseline: Whether the others are compared with it; one arm of a panel at most.
    """

    label: str
    runs: tuple[Run, ...]
    ours: bool
    baseline: bool


@dataclass(frozen=True, eq=False)
class PanelResult:
    """One panel of a figure.

    Args:
        title: Its heading.
        arms: In the order of the figure.
        kind: How it is drawn: ``curves`` (validation loss against tokens), ``scaling``, ``grid``, ``qkv``, ``table``.
        extra: What the kind needs beside the runs. ``qkv``: empty. ``curves``: empty, or ``rule``, what was fixed
            before the runs: ``{"margin", "pilot", "budget", "needed", "ends"}``, where ``needed`` is in pairs and
            ``ends`` are the arms that are best at an end of the grid. ``grid``: ``axis`` (the key that varies, e.g.
            ``model.optim.lr``) and ``series``, a list of ``{"label", "ours", "baseline", "values", "arms"}``: the
            values of the axis and the labels of the arms trained at them, in the same order. ``scaling``: ``series``,
            a list of ``{"label", "ours", "baseline", "sizes", "parameters", "arms"}``. ``table``: ``columns`` and
            ``rows``, of text and numbers.
        notes: Sentences for the reader: what was trained, and how far it can be trusted.
    """

    title: str
    arms: tuple[ArmResult, ...]
    kind: PanelKind
    extra: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class FigureResult:
    """One figure or table of the paper, regenerated.

    Args:
        name: Of its YAML, e.g. ``placement``.
        title: Its heading.
        section: Where the paper has it.
        summary: What it is about, in one or two sentences.
        panels: In the paper's order.
        verdicts: One per claim.
        warnings: What weakens the comparison, one sentence each.
        command: What makes this figure again.
        tokens_per_param: Training tokens per (activated) parameter of its runs, the fewest.
        paper_numbers: (what, the paper's number as text).
        paper_tokens_per_param: The paper's, as text.
    """

    name: str
    title: str
    section: str
    summary: str
    panels: tuple[PanelResult, ...]
    verdicts: tuple[Verdict, ...]
    warnings: tuple[str, ...]
    command: str
    tokens_per_param: float
    paper_numbers: tuple[tuple[str, str], ...]
    paper_tokens_per_param: str = "100"

    def claim(self, verdict: Verdict) -> str:
        """A claim in words, with its panel where claims of several panels are alike."""
        alike = len({each.panel for each in self.verdicts if each.claim == verdict.claim}) > 1
        return f"{verdict.panel}: {verdict.claim}" if alike else verdict.claim
