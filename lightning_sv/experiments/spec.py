"""Types of conf/paper: figures, panels, arms, claims, and the budgets they are run on."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

CONF = Path("conf")
#: how a panel is drawn: loss against tokens, size, length of training, a setting; norms of Q, K and V; another logged
#: scalar against tokens; a table
PanelKind = Literal["curves", "scaling", "lengths", "grid", "qkv", "scalar", "table"]


@dataclass(frozen=True)
class ModelSpec:
    """A model under one budget.

    Args:
        config: file of conf/model, without its ending
        overrides: keys of `fit` in which runs of this budget differ from the file
        tuned: file of conf/paper/tuned, without its ending, whose optimum each arm has; "" where all arms have the same
        seconds_per_1000_steps: of one core, `llama` with AdamW; None where hours follow from FLOPs
        residual_std: of loss = arm + seed + residual over recorded runs under AdamW and cosine,
            nats per token; 0 where nothing is recorded
        note: what a reader of its losses must know
    """

    config: str
    overrides: dict[str, Any] = field(default_factory=dict)
    tuned: str = ""
    seconds_per_1000_steps: float | None = None
    residual_std: float = 0.0
    note: str = ""


@dataclass(frozen=True)
class Budget:
    """What the experiments may spend: sizes, steps, pairs and machine.

    Attributes:
        summary: what it varies and trains, in one sentence
        layers: files of conf/ below the model: trainer and data
        seeds: pairs of every panel that does not say otherwise
        models: role, as the figures name it -> model
        unavailable: role -> why it is not trained on this budget
        overrides: keys of `fit` that all runs of this budget have
        relative_step_time: placement, optimizer or probes -> time of a step over `llama`'s with AdamW
        first_seed: of them; a new recording takes new ones, so that it can be pooled with the old
        gpu: kind of GPU; None for a CPU
        startup_seconds: seconds of a run on a CPU that its summary does not time: imports, tables, the picture
        sbatch: options of the SLURM job that trains one run
        caution: what a reader must know of all its losses; stands at the head of the report
        figures: those that belong to it; all where it names none
        paper_scale: whether models and tokens are the paper's, so that its numbers can be looked for in the intervals
    """

    name: str
    summary: str
    layers: list[str]
    seeds: int
    models: dict[str, ModelSpec]
    unavailable: dict[str, str] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)
    relative_step_time: dict[str, float] = field(default_factory=dict)
    first_seed: int = 0
    gpu: str | None = None
    startup_seconds: float = 0.0
    sbatch: list[str] = field(default_factory=list)
    caution: str = ""
    figures: list[str] = field(default_factory=list)
    paper_scale: bool = False


@dataclass(frozen=True)
class ArmSpec:
    """One arm of a panel.

    Args:
        scale: scale-vector strategy, as in model.scale
        not_in_paper: whether the paper does not have it
        baseline: whether the others are compared with it
        overrides: keys of `fit` that its runs have
        longer: steps over those of the panel
        lr: budget -> peak learning rate of its own; under other budgets the tuned one. In a panel with `lr`, the arm is
            not trained under other budgets
        model: role of its model, where it is not the panel's
        axes: of a grid, key -> budget -> its values, where they are not the panel's: optima lie apart
        skip_under: budget -> why the arm is not trained there
    """

    scale: str
    not_in_paper: bool = False
    baseline: bool = False
    overrides: dict[str, Any] = field(default_factory=dict)
    longer: float = 1.0
    lr: dict[str, float] | None = None
    model: str | None = None
    axes: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    skip_under: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ClaimSpec:
    """A statement that runs can check; which fields count depends on the kind (`claims.claim_types.KINDS`).

    Attributes:
        paper: the paper's number or finding
        margin: in the unit of the claim, nats per token where it is a loss
        at: earlier share of the training, where the claim has one
        until: later share of the training
        tags: names of two logged scalars, whose rates of growth are compared
        text: the statement, where the kind's own words do not fit
        skip_under: budget -> why it cannot be tested there
        primary: whether it is the figure's first question, for which all figures are corrected together; where none
            says so, that of the figure's first claim is
        paper_value: the paper's number for what is estimated: A - B in nats per token, or how many times
        crossing: steps at which A is known to pass B: a run that ends before them does not test the claim
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
    skip_under: dict[str, str] = field(default_factory=dict)
    primary: bool = False
    paper_value: float | None = None
    crossing: int = 0


@dataclass(frozen=True)
class PanelSpec:
    """One panel of a figure.

    Attributes:
        arms: what is trained, by the label in legends and claims
        claims: statements that the runs decide, in the paper's order
        model: role of the model that all arms train, see `Budget.models`
        models: roles of the sizes of a scaling panel, or of the lengths of training of one model, instead
        kind: how it is drawn
        seeds: budget -> number of pairs
        overrides: keys of `fit` that all runs of this budget have
        lr: budget -> peak learning rate of all arms, in place of tuned values; a budget that it does not name cannot
            train the panel, and without `lr` tuned values count. An arm's own `lr` counts more
        tuned_as: strategy whose optimum all arms share; each has its own where it says nothing or `own`, which is
            refused where nobody has found it, while nothing means the model's own values then
        axes: of a grid: key that it varies -> budget -> the values; all their combinations are trained
        one_at_a_time: budgets at which one axis is varied at a time instead, the others at the first of their values
        file: of a table: measured figures to show
        picture: of a table: a PNG that another command drew, to stand above it
        tag: of a panel of the kind `scalar`: the logged scalar, above 0, that it draws and its claims compare
        probes: file of conf/probes, for what is logged beside the loss; "" for none
        skip_under: budget -> why the panel cannot be had there
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
    overrides: dict[str, Any] = field(default_factory=dict)
    lr: dict[str, float] | None = None
    tuned_as: str = ""
    axes: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    one_at_a_time: list[str] = field(default_factory=list)
    file: str | None = None
    picture: str = ""
    tag: str = ""
    probes: str = ""
    skip_under: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Tuned:
    """The optima of some arms of one model: what the figure `tuning` found, see sources/from_yaml.py.

    Attributes:
        source: the command, the seeds and the commit that they are from
        optim: file of conf/optim under which they were found; panels of another have no use for them
        schedule: file of conf/schedule, likewise
        d_model: width of the model: another takes the initial std times sqrt(d_model / its own)
        arms: strategy -> key of `fit` -> value
    """

    name: str
    source: str
    optim: str
    schedule: str
    d_model: int
    arms: dict[str, dict[str, float]]


@dataclass(frozen=True)
class FigureSpec:
    """A figure or table of the paper.

    Attributes:
        section: where the paper has it
        paper: what -> the paper's number
        paper_tokens_per_param: what the paper trains these models with
        papers_protocol: whether the paper's numbers are looked for in the intervals whatever the budget, because the
            runs follow its protocol
    """

    name: str
    title: str
    section: str
    summary: str
    panels: list[PanelSpec]
    paper: dict[str, str] = field(default_factory=dict)
    paper_tokens_per_param: str = "100"
    papers_protocol: bool = False
