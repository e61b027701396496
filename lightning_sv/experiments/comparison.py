"""The outcome of a comparison: a table, one sentence per arm, a JSON of every figure, the chart.

The arms are one baseline A and one or several others. Every figure about an other arm is about its
pair with A; the others are not compared with each other.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from lightning_sv.analysis.style import human_tokens
from lightning_sv.experiments.checks import ConfigDifference
from lightning_sv.experiments.pair import Pair, TrainedArm
from lightning_sv.runs.events import Run


@dataclass(frozen=True, eq=False)
class Comparison:
    """A baseline and the other arms, their completed runs seed by seed, and what they say.

    Args:
        a: The arm compared with, the baseline.
        others: The arms in question, at least one; differences are theirs minus A.
        seeds: Seeds of the pairs.
        runs: Every run by its name, seed by seed: ``a-seed0``, ``b-seed0``, ..., ``a-seed1``, ...
        commands: Command line of every run, by its name.
        reused: Names of the runs that were complete beforehand.
        differences: Where the configs differ.
        warnings: Sentences on what weakens the comparison.
        out: Directory of the comparison.
        confidence: Coverage of the intervals.
    """

    a: TrainedArm
    others: tuple[TrainedArm, ...]
    seeds: tuple[int, ...]
    runs: Mapping[str, Run]
    commands: Mapping[str, Sequence[str]]
    reused: frozenset[str]
    differences: tuple[ConfigDifference, ...]
    warnings: tuple[str, ...]
    out: Path
    confidence: float = 0.95

    @property
    def arms(self) -> tuple[TrainedArm, ...]:
        """The baseline and the others."""
        return (self.a, *self.others)

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """A with each other arm, in the order of ``others``."""
        return tuple(Pair(self.a, arm, self.confidence) for arm in self.others)

    def to_dict(self) -> dict[str, Any]:
        """Every figure with what is needed to get it again; plain JSON types."""
        first = self.a.runs[0].summary
        return {
            "unit": "nats per token",
            "seeds": list(self.seeds),
            "arms": [arm.to_dict() for arm in self.arms],
            "differences": [pair.to_dict() for pair in self.pairs],
            "runs": [
                {
                    "name": name,
                    "reused": name in self.reused,
                    "command": shlex.join(self.commands[name]),
                    "val_loss": run.val_loss,
                    "tokens": run.tokens,
                    "summary": dict(run.summary),
                }
                for name, run in self.runs.items()
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

    def print(self, console: Console) -> None:
        """Table, sentences, warnings and the paths of the files."""
        console.print(self._table())
        for pair in self.pairs:
            console.print(pair.sentence(), markup=False, highlight=False, style="bold")
            console.print(pair.tokens_sentence(), markup=False, highlight=False)
        for warning in self.warnings:
            console.print(f"Warning: {warning}", markup=False, highlight=False, style="yellow")
        found = [self.out / name for name in ("comparison.json", "comparison.png", "sharpness.png")]
        files = "\n".join(str(file) for file in found if file.exists())
        console.print(files, markup=False, highlight=False, soft_wrap=True)

    def _table(self) -> Table:
        table = Table(title="val loss, nats per token", title_justify="left")
        table.add_column("strategy", overflow="fold")
        for head in ("mean", *(f"seed {k}" for k in self.seeds)):
            table.add_column(head, justify="right", no_wrap=True)
        table.add_column(f"tokens to {self.a.label}'s final loss", justify="right")
        efficiencies = [pair.efficiency for pair in self.pairs]
        reached = [efficiencies[0].tokens_a, *(e.tokens_b for e in efficiencies)]
        for arm, tokens in zip(self.arms, reached, strict=True):
            numbers = (f"{x:.4f}" for x in (arm.mean_loss, *arm.losses))
            table.add_row(arm.label, *numbers, _mean_tokens(tokens))
        table.add_section()
        for pair, e in zip(self.pairs, efficiencies, strict=True):
            factor = "" if e.factor is None else f"x {1 / e.factor:.2f}"
            numbers = (f"{x:+.4f}" for x in (pair.difference.mean, *pair.per_seed))
            table.add_row(pair.title, *numbers, factor)
        return table


def _mean_tokens(tokens: Sequence[float | None]) -> str:
    reached = [t for t in tokens if t is not None]
    if len(reached) < len(tokens):
        return f"reached in {len(reached)} of {len(tokens)}"
    return human_tokens(float(np.mean(reached)), digits=3)


def _versions() -> dict[str, str]:
    found = {}
    for package in ("lightning_sv", "torch", "lightning", "litdata", "numpy", "scipy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
