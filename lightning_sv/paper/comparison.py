"""The outcome of a comparison: one sentence, a table, a JSON of every figure, the chart.

All losses are the last ``val/loss`` of the runs' event files, nats per token.
"""

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from lightning_sv.paper.checks import ConfigDifference
from lightning_sv.paper.draw import human_tokens
from lightning_sv.paper.events import VAL_LOSS, Run
from lightning_sv.paper.stats import (
    PairedDifference,
    TokenEfficiency,
    paired_difference,
    token_efficiency,
)


@dataclass(frozen=True)
class Arm:
    """One side of a comparison.

    Args:
        label: What the table and the chart call it, e.g. ``unified``.
        scale: The value of ``--model.scale``.
        args: Further arguments for this arm alone, e.g. ``("--optim.lr", "3e-3")``.
    """

    label: str
    scale: str
    args: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Comparison:
    """Two arms, their completed runs seed by seed, and what they say.

    Args:
        a: The arm compared with, usually the baseline.
        b: The arm in question; differences are B - A.
        seeds: Seeds of the pairs.
        runs_a: Arm A's runs, in the order of ``seeds``.
        runs_b: Arm B's runs.
        commands: Command line of every run, by its name (``a-seed0``).
        reused: Names of the runs that were complete beforehand.
        differences: Where the configs differ.
        warnings: Sentences on what weakens the comparison.
        out: Directory of the comparison.
        confidence: Coverage of the intervals.
    """

    a: Arm
    b: Arm
    seeds: tuple[int, ...]
    runs_a: tuple[Run, ...]
    runs_b: tuple[Run, ...]
    commands: Mapping[str, Sequence[str]]
    reused: frozenset[str]
    differences: tuple[ConfigDifference, ...]
    warnings: tuple[str, ...]
    out: Path
    confidence: float = 0.95

    @property
    def losses(self) -> tuple[list[float], list[float]]:
        """Final validation losses of A and of B, nats per token, one per seed."""
        return [run.val_loss for run in self.runs_a], [run.val_loss for run in self.runs_b]

    @property
    def difference(self) -> PairedDifference:
        """B - A, nats per token."""
        return paired_difference(*self.losses, self.confidence)

    @property
    def efficiency(self) -> TokenEfficiency:
        """Tokens each arm needs for A's final loss."""
        a, b = ([run.curve(VAL_LOSS) for run in runs] for runs in (self.runs_a, self.runs_b))
        return token_efficiency(a, b, self.confidence)

    def sentence(self) -> str:
        """The verdict as one plain sentence."""
        d, a, b = self.difference, self.a.label, self.b.label
        if d.low is None or d.high is None or d.smallest_resolvable is None:
            return (
                f"No verdict: one pair gives no interval; {b} - {a} is {d.mean:+.3f} nats per "
                "token for this seed alone. Add seeds."
            )
        digits = _digits(d.smallest_resolvable)
        level = f"{self.confidence:.0%} interval"
        if not d.resolved:
            return (
                f"Not resolved: the {level} of {b} - {a}, {d.low:+.{digits}f} to "
                f"{d.high:+.{digits}f} nats per token, covers zero; {d.n} pairs could show a "
                f"difference of about {d.smallest_resolvable:.{digits}f}."
            )
        low, high = sorted((abs(d.low), abs(d.high)))
        return (
            f"{b} is {'lower' if d.mean < 0 else 'higher'} than {a} by {abs(d.mean):.{digits}f} "
            f"nats per token ({level} {low:.{digits}f} to {high:.{digits}f}, {d.n} pairs)."
        )

    def tokens_sentence(self) -> str:
        """How many tokens B needs for A's final loss, as one plain sentence."""
        e, a, b = self.efficiency, self.a.label, self.b.label
        if e.factor is None:
            pairs = "pair" if e.n == 1 else "pairs"
            return f"{b} reaches {a}'s final loss in {e.reached} of {e.n} {pairs}: no token factor."
        interval = "one pair, no interval"
        if e.low is not None and e.high is not None:
            interval = f"{self.confidence:.0%} interval {e.low:.2f} to {e.high:.2f}, {e.n} pairs"
        return f"To {a}'s final loss, {a} needs {e.factor:.2f} times the tokens of {b} ({interval})."

    def to_dict(self) -> dict[str, Any]:
        """Every figure with what is needed to get it again; plain JSON types."""
        d, e = self.difference, self.efficiency
        first = self.runs_a[0].summary
        return {
            "sentence": self.sentence(),
            "tokens_sentence": self.tokens_sentence(),
            "unit": "nats per token",
            "seeds": list(self.seeds),
            "a": _arm(self.a, self.runs_a),
            "b": _arm(self.b, self.runs_b),
            "difference": {
                **asdict(d),
                "verdict": d.verdict,
                "resolved": d.resolved,
                "smallest_resolvable": d.smallest_resolvable,
                "per_seed": [y - x for x, y in zip(*self.losses, strict=True)],
            },
            "tokens_to_final_loss_of_a": {**asdict(e), "n": e.n, "reached": e.reached},
            "runs": [
                {
                    "name": name,
                    "reused": name in self.reused,
                    "command": shlex.join(self.commands[name]),
                    "val_loss": run.val_loss,
                    "tokens": run.tokens,
                    "summary": dict(run.summary),
                }
                for name, run in self.named_runs().items()
            ],
            "config_differences": [d._asdict() for d in self.differences],
            "warnings": list(self.warnings),
            "corpus_hash": first["corpus_hash"],
            "tokenizer_sha256": first["tokenizer_sha256"],
            "versions": _versions(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }

    def to_json(self) -> str:
        """``to_dict`` as text."""
        return json.dumps(self.to_dict(), indent=2, default=str)

    def named_runs(self) -> dict[str, Run]:
        """Runs by name, pair by pair: a-seed0, b-seed0, a-seed1, ..."""
        pairs = zip(self.seeds, self.runs_a, self.runs_b, strict=True)
        return {f"{arm}-seed{k}": run for k, x, y in pairs for arm, run in (("a", x), ("b", y))}

    def print(self, console: Console) -> None:
        """Table, sentences, warnings and the paths of the files."""
        table = Table(title="val loss, nats per token", title_justify="left")
        table.add_column("strategy", overflow="fold")
        for head in ("mean", *(f"seed {k}" for k in self.seeds)):
            table.add_column(head, justify="right", no_wrap=True)
        table.add_column(f"tokens to {self.a.label}'s final loss", justify="right")
        losses_a, losses_b = self.losses
        e = self.efficiency
        for label, losses, tokens in (
            (self.a.label, losses_a, e.tokens_a),
            (self.b.label, losses_b, e.tokens_b),
        ):
            numbers = (f"{x:.4f}" for x in (float(np.mean(losses)), *losses))
            table.add_row(label, *numbers, _mean_tokens(tokens))
        differences = [y - x for x, y in zip(losses_a, losses_b, strict=True)]
        table.add_section()
        factor = "" if e.factor is None else f"x {1 / e.factor:.2f}"
        numbers = (f"{x:+.4f}" for x in (self.difference.mean, *differences))
        table.add_row(f"{self.b.label} - {self.a.label}", *numbers, factor)
        console.print(table)
        console.print(self.sentence(), markup=False, highlight=False, style="bold")
        console.print(self.tokens_sentence(), markup=False, highlight=False)
        for warning in self.warnings:
            console.print(f"Warning: {warning}", markup=False, highlight=False, style="yellow")
        files = f"{self.out / 'comparison.json'}\n{self.out / 'comparison.png'}"
        console.print(files, markup=False, highlight=False, soft_wrap=True)


def _arm(arm: Arm, runs: Sequence[Run]) -> dict[str, Any]:
    losses = [run.val_loss for run in runs]
    return {**asdict(arm), "val_loss": float(np.mean(losses)), "val_loss_per_seed": losses}


def _mean_tokens(tokens: Sequence[float | None]) -> str:
    reached = [t for t in tokens if t is not None]
    if len(reached) < len(tokens):
        return f"reached in {len(reached)} of {len(tokens)}"
    return human_tokens(float(np.mean(reached)), digits=3)


def _digits(scale: float) -> int:
    """Decimals that show two figures of ``scale``, at least three."""
    return 3 if scale <= 0 else min(6, max(3, 1 - math.floor(math.log10(scale))))


def _versions() -> dict[str, str]:
    found = {}
    for package in ("lightning_sv", "torch", "lightning", "litdata", "numpy", "scipy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
