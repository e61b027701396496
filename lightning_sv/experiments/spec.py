"""What the YAML files of conf/paper may say: figures, panels, arms, claims; and the budgets they are run on."""

from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

CONF = Path("conf")
#: how a panel is drawn: loss against tokens, against size, against a setting; norms of Q, K and V; a table
PanelKind = Literal["curves", "scaling", "grid", "qkv", "table"]


def unknown(what: str, name: str, known: list[str]) -> ValueError:
    """The error that lists what is known, the nearest name first."""
    near = get_close_matches(name, known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ValueError(
        f"{what} {name!r} is unknown; known: {' '.join(known) or 'none (run it in the repository)'}.{hint}"
    )


@dataclass(frozen=True)
class ModelSpec:
    """A model under one budget.

    Args:
        config: File of conf/model, without its ending.
        set: Keys of a run that differ from it.
        seconds_per_1000_steps: Of one core, ``llama`` with AdamW; None where hours follow from FLOPs.
        note: What a reader of its losses must know.
    """

    config: str
    set: dict[str, Any] = field(default_factory=dict)
    seconds_per_1000_steps: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Budget:
    """What the experiments may spend: sizes, steps, pairs and machine.

    Args:
        name: Of its file.
        summary: One sentence.
        layers: Files of conf/ below the model: trainer and data.
        seeds: Pairs of every panel that does not say otherwise.
        models: Role, as the figures name it -> model.
        lacks: Role -> why it is not trained on this budget.
        set: Keys of every run.
        relative_step_time: Placement or optimizer -> time of a step over ``llama``'s with AdamW.
        gpu: Kind of GPU; None for a CPU.
        startup_seconds: Seconds of a run on a CPU that its summary does not time: imports, tables, the picture.
        sbatch: Options of a SLURM job that trains one run.
        caution: What a reader must know of all its losses; stands at the head of the report.
    """

    name: str
    summary: str
    layers: list[str]
    seeds: int
    models: dict[str, ModelSpec]
    lacks: dict[str, str] = field(default_factory=dict)
    set: dict[str, Any] = field(default_factory=dict)
    relative_step_time: dict[str, float] = field(default_factory=dict)
    gpu: str | None = None
    startup_seconds: float = 0.0
    sbatch: list[str] = field(default_factory=list)
    caution: str = ""


@dataclass(frozen=True)
class ArmSpec:
    """One arm of a panel.

    Args:
        scale: Strategy.
        ours: Whether the paper does not have it.
        baseline: Whether the others are compared with it.
        set: Keys of its runs.
        longer: Steps over those of the panel.
        lr: Budget -> peak learning rate; the tuned one where it says nothing.
        model: Role of its model, where it is not the panel's.
        values: Budget -> its values of a grid, where they are not the panel's: optima lie apart.
    """

    scale: str
    ours: bool = False
    baseline: bool = False
    set: dict[str, Any] = field(default_factory=dict)
    longer: float = 1.0
    lr: dict[str, float] = field(default_factory=dict)
    model: str | None = None
    values: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class ClaimSpec:
    """A statement that runs can check; which fields count depends on the kind (`lightning_sv.experiments.kinds.KINDS`).

    Args:
        kind: Name of the row.
        paper: The paper's number or finding.
        a: Arm in question.
        b: Arm it is compared with.
        margin: In the unit of the claim, nats per token where it is a loss.
        at: Earlier share of the training, where the claim has one.
        until: Later share.
        tags: Two scalars.
        text: The statement, where the kind's own words do not fit.
        not_at: Budget -> why it cannot be tested there.
    """

    kind: str
    paper: str
    a: str
    b: str = ""
    margin: float = 0.0
    at: float = 0.25
    until: float = 1.0
    tags: list[str] = field(default_factory=list)
    text: str | None = None
    not_at: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Rule:
    """What was fixed before the runs: as many pairs as the pilot's spread asks for, once; no look in between.

    Args:
        margin: Nats per token: the difference that counts.
        pilot: Pairs whose spread gives the number needed.
        budget: Pairs at most; where more are needed, or the interval is wider than the margin after all, the verdict
            is ``not resolved``.
    """

    margin: float
    pilot: int
    budget: int


@dataclass(frozen=True)
class PanelSpec:
    """One panel of a figure.

    Args:
        title: Its heading.
        arms: By label.
        claims: In the paper's order.
        model: Role of the model.
        models: Roles of the sizes of a scaling panel, instead.
        kind: How it is drawn.
        optim: File of conf/optim.
        schedule: File of conf/schedule.
        seeds: Budget -> number of pairs.
        set: Keys of every run.
        axis: Key that a grid varies.
        values: Budget -> the values of a grid.
        rule: Of a grid: each arm at its best value is compared on seeds of its own.
        file: Of a table: measured figures to show.
        not_at: Budget -> why the panel cannot be had there.
    """

    title: str
    arms: dict[str, ArmSpec] = field(default_factory=dict)
    claims: list[ClaimSpec] = field(default_factory=list)
    model: str = "dense"
    models: list[str] = field(default_factory=list)
    kind: PanelKind = "curves"
    optim: str = "adamw"
    schedule: str = "cos"
    seeds: dict[str, int] = field(default_factory=dict)
    set: dict[str, Any] = field(default_factory=dict)
    axis: str = ""
    values: dict[str, list[float]] = field(default_factory=dict)
    rule: Rule | None = None
    file: str | None = None
    not_at: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class FigureSpec:
    """A figure or table of the paper.

    Args:
        name: Of its file.
        title: Its heading.
        section: Where the paper has it.
        summary: What it is about.
        panels: In the paper's order.
        paper: What -> the paper's number.
        paper_tokens_per_param: What the paper trains these models with.
    """

    name: str
    title: str
    section: str
    summary: str
    panels: list[PanelSpec]
    paper: dict[str, str] = field(default_factory=dict)
    paper_tokens_per_param: str = "100"
