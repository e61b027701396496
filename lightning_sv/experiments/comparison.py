"""The outcome of a comparison: a table, one sentence per arm, a JSON of every figure.

The arms are one baseline A and one or several others. Every figure about an other arm is about its pair with A; the
others are not compared with each other. All losses are the last `val/loss` of the runs' event files, nats per token.
"""

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from lightning_sv.analysis.decision import difference_sentence, direction, times, tokens_sentence
from lightning_sv.analysis.paired import PairedDifference, TokenEfficiency, token_factor
from lightning_sv.errors import NotTestableError
from lightning_sv.experiments.checks import ConfigDifference
from lightning_sv.experiments.claims.together import TWO_SIDED, difference
from lightning_sv.experiments.results import Arm, Figure, Panel
from lightning_sv.runs.events import Run
from lightning_sv.settings.words import words_of
from lightning_sv.version import __version__


@dataclass(frozen=True, eq=False)
class Pair:
    """The baseline A and one other arm B, in pairs that share a seed; differences are B - A.

    Args:
        a: the arm compared with
        b: the arm in question, on the same seeds
        difference: B - A, nats per token, with the scatter of all arms that are compared
    """

    a: Arm
    b: Arm
    difference: PairedDifference

    @property
    def title(self) -> str:
        """What the difference is called, e.g. `unified - llama`."""
        return f"{self.b.label} - {self.a.label}"

    @property
    def per_seed(self) -> list[float]:
        """B - A of every seed, nats per token."""
        return [float(x) for x in self.b.losses - self.a.losses]

    @property
    def efficiency(self) -> TokenEfficiency:
        """Tokens each of the two needs for the higher of their final losses."""
        return token_factor(self.a.curves, self.b.curves, TWO_SIDED)

    def sentence(self) -> str:
        """The verdict as one plain sentence."""
        return difference_sentence(self.a.label, self.b.label, self.difference)

    def tokens_sentence(self) -> str:
        """The ratio of their tokens as one plain sentence."""
        return tokens_sentence(self.a.label, self.b.label, self.efficiency, TWO_SIDED)

    def to_dict(self) -> dict[str, Any]:
        """Every figure of the pair; plain JSON types."""
        d, e = self.difference, self.efficiency
        word = direction(d)
        resolved = word in ("lower", "higher")
        return {
            "b": self.b.label,
            "sentence": self.sentence(),
            "tokens_sentence": self.tokens_sentence(),
            "difference": {
                **asdict(d),
                "verdict": f"B {word}" if resolved else word,
                "resolved": resolved,
                "smallest_resolvable": d.smallest_resolvable,
                "per_seed": self.per_seed,
            },
            "tokens_to_higher_final_loss": {**asdict(e), "n": e.n},
        }


def pairs_of(panel: Panel) -> tuple[tuple[Pair, ...], tuple[str, ...]]:
    """The baseline, its first arm, with each other arm; and a sentence on each that cannot be compared."""
    found, lost = [], []
    a, *others = panel.arms
    for arm in others:
        try:
            d = difference(panel, arm, a, confidence=TWO_SIDED)
        except NotTestableError as error:
            lost.append(f"{arm.label} and {a.label} are not compared: {error}")
        else:
            found.append(Pair(*a.paired(arm), d))
    return tuple(found), tuple(lost)


def in_words(figure: Figure) -> Figure:
    """A figure of one panel that says what each of its pairs came to, below its table."""
    (panel,) = figure.panels
    pairs, lost = pairs_of(panel)
    said = (f"{pair.sentence()} {pair.tokens_sentence()}" for pair in pairs)
    return replace(figure, panels=(replace(panel, notes=(*said, *panel.notes)),), warnings=(*figure.warnings, *lost))


@dataclass(frozen=True, eq=False)
class Comparison:
    """A judged figure of one panel of losses: a baseline and the other arms.

    Args:
        figure: its first panel has the arms, the baseline first
        runs: every run by its name, seed by seed: `a-seed0`, `b-seed0`, ..., `a-seed1`, ...
        commands: command line of every run, by its name
        reused: keys of the runs that were complete beforehand
        differences: where the configs differ
        out: directory of the comparison
    """

    figure: Figure
    runs: Mapping[str, Run]
    commands: Mapping[str, list[str]]
    reused: frozenset[str]
    differences: tuple[ConfigDifference, ...]
    out: Path

    @property
    def arms(self) -> tuple[Arm, ...]:
        """The baseline and the others."""
        return self.figure.panels[0].arms

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences on what weakens the comparison."""
        return self.figure.warnings

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """A with each other arm, in their order."""
        return pairs_of(self.figure.panels[0])[0]

    def to_dict(self) -> dict[str, Any]:
        """Every figure with what is needed to get it again; plain JSON types."""
        first, packages = self.arms[0].runs[0].summary, ("torch", "lightning", "litdata", "numpy", "scipy")
        specs = self.figure.spec.panels[0].arms
        return {
            "unit": "nats per token",
            "seeds": list(self.arms[0].seeds),
            "arms": [
                {
                    "label": arm.label,
                    "scale": specs[arm.label].scale,
                    "args": words_of(specs[arm.label].set),
                    "val_loss": float(np.mean(arm.losses)),
                    "val_loss_per_seed": arm.losses.tolist(),
                }
                for arm in self.arms
            ],
            "differences": [pair.to_dict() for pair in self.pairs],
            "runs": [
                {
                    "name": name,
                    "dir": os.path.relpath(run.dir, self.out),
                    "reused": run.dir.name in self.reused,
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
            "versions": {"lightning_sv": __version__, **{package: version(package) for package in packages}},
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=2, default=str)

    def print(self, console: Console) -> None:
        """Table, sentences, warnings and the paths of the files."""
        console.print(self._table())
        for pair in self.pairs:
            console.print(pair.sentence(), markup=False, highlight=False, style="bold")
            console.print(pair.tokens_sentence(), markup=False, highlight=False)
        for warning in self.warnings:
            console.print(f"Warning: {warning}", markup=False, highlight=False, style="yellow")
        found = [self.out / name for name in ("comparison.json", "comparison.png", "sharpness.png", "report.html")]
        files = "\n".join(str(file) for file in found if file.exists())
        console.print(files, markup=False, highlight=False, soft_wrap=True)

    def _table(self) -> Table:
        table = Table(title="val loss, nats per token", title_justify="left")
        table.add_column("strategy", overflow="fold")
        for head in ("mean", *(f"seed {k}" for k in self.arms[0].seeds)):
            table.add_column(head, justify="right", no_wrap=True)
        pairs, factors = self.pairs, [pair.efficiency.factor for pair in self.pairs]
        if any(factors):
            table.add_column(f"tokens of {self.arms[0].label} / its own", justify="right")
        for arm in self.arms:
            table.add_row(arm.label, *(f"{x:.4f}" for x in (float(np.mean(arm.losses)), *arm.losses)))
        table.add_section()
        for pair, factor in zip(pairs, factors, strict=True):
            numbers = (f"{x:+.4f}" for x in (pair.difference.mean, *pair.per_seed))
            table.add_row(pair.title, *numbers, *([times(factor)] if factor else []))
        return table
