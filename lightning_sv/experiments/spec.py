"""Figures, panels, arms, claims, budgets and tuned optima of conf/paper.

The report of the figure `tuning` (report/write.py) has the files of conf/paper/tuned, which are
copied by hand.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from lightning_sv.errors import expect_known
from lightning_sv.settings.yaml_file import read_as

#: conf/ of the working directory, or that of the package if it has no experiments
CONF = Path("conf") if Path("conf/paper").is_dir() else Path(__file__).parents[1] / "conf"
#: key of a grid -> budget -> values
Axes = dict[str, dict[str, list[int | float]]]


@dataclass(frozen=True)
class ModelSpec:
    """A model under one budget.

    Attributes:
        config: file of conf/model, without its ending
        overrides: keys of `fit` in which runs of this budget differ from the file
        tuned: file of conf/paper/tuned, without its ending, with the optimum of each arm; "" if all
            arms have the same
        seconds_per_1000_steps: measured seconds of one core or one GPU, for `llama` with AdamW;
            None if hours follow from FLOPs
        note: sentence for readers of its losses
    """

    config: str
    overrides: dict[str, Any] = field(default_factory=dict)
    tuned: str = ""
    seconds_per_1000_steps: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Budget:
    """Sizes, steps, pairs and machine of the experiments.

    Attributes:
        summary: models and training, in one sentence
        layers: files of conf/ below the model: trainer and data
        seeds: pairs of each panel that does not set its own number
        models: role in the figures -> model
        unavailable: role -> why it is not trained under this budget
        overrides: keys of `fit` of all runs
        relative_step_time: placement, optimizer or probes -> time of a step relative to `llama`
            with AdamW
        first_seed: first seed; a new recording has new seeds, so that it can be pooled with the old
            one
        gpu: kind of GPU, whose hours are computed from FLOPs; None if `seconds_per_1000_steps` are
            measured, on CPU or GPU
        startup_seconds: seconds of a run that its summary does not count: imports, compilation,
            tables, the picture
        sbatch: options of the SLURM job of one run
        caution: warning about all losses, at the head of the report
        figures: figures of this budget; empty for all
        paper_scale: if True, models and tokens are those of the paper, so that intervals are
            compared with its numbers
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

    Attributes:
        scale: scale-vector strategy, as in model.scale
        overrides: keys of `fit` of its runs
        longer: factor on the steps of the panel
        lr: budget -> peak learning rate; other budgets have the tuned one. In a panel with `lr`,
            other budgets do not train the arm
        model: role of its model, if it is not that of the panel
        axes: key of a grid -> budget -> values, if they are not those of the panel
        seeds: budget -> number of its runs, if it is not that of the panel
        skip_under: budget -> why the arm is not trained there
    """

    scale: str
    not_in_paper: bool = False
    baseline: bool = False
    overrides: dict[str, Any] = field(default_factory=dict)
    longer: float = 1.0
    lr: dict[str, float] | None = None
    model: str | None = None
    axes: Axes = field(default_factory=dict)
    seeds: dict[str, int] = field(default_factory=dict)
    skip_under: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ClaimSpec:
    """A statement that runs can check; `claims.claim_types.KINDS` defines which fields count.

    Attributes:
        paper: number or finding of the paper
        margin: margin in the unit of the claim
        at: earlier share of the training, if the claim has one
        until: later share of the training
        tags: names of two logged scalars whose growth is compared
        text: statement instead of the one of its kind
        skip_under: budget -> why it cannot be tested there
        primary: if True, the primary claim of its figure, which by default is the first claim
        paper_value: number of the paper for the estimate: A - B in nats per token, or a ratio
        crossing: steps after which A is known to be below B; shorter runs do not test the claim
    """

    kind: str
    paper: str = "not stated"
    a: str = field(kw_only=True)
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

    @property
    def arms(self) -> tuple[str, ...]:
        """Labels of the arms that it is about, or of their series."""
        return tuple(filter(None, (self.a, self.b)))


@dataclass(frozen=True)
class PanelSpec:
    """One panel of a figure.

    Attributes:
        arms: label in legends and claims -> arm
        claims: statements to decide, in the order of the paper
        model: role of the model of all arms, see `Budget.models`
        kind: row of `kinds.KINDS`
        models: roles of the sizes of a scaling panel, or of the lengths of training of one model
        seeds: budget -> number of pairs
        overrides: keys of `fit` of all runs
        lr: budget -> peak learning rate of all arms instead of tuned values; other budgets cannot
            train the panel. An arm may have its own `lr`
        tuned_as: strategy whose optimum all arms have. "": each arm has its own, or that of the
            model if it is not tuned. "own": as "", but the panel is refused if it is not tuned
        axes: key of a grid -> budget -> values; all combinations are trained
        one_at_a_time: budgets under which one axis varies at a time, the others at their first
            values
        tag: logged scalar, above 0, of a panel of the kind `scalar`
        probes: file of conf/probes; "" for none
        skip_under: budget -> why the panel is unavailable there
    """

    title: str
    arms: dict[str, ArmSpec] = field(default_factory=dict)
    claims: list[ClaimSpec] = field(default_factory=list)
    model: str = "dense"
    models: list[str] = field(default_factory=list)
    kind: str = "curves"
    optim: str = "adamw"
    schedule: str = "cos"
    seeds: dict[str, int] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)
    lr: dict[str, float] | None = None
    tuned_as: str = ""
    axes: Axes = field(default_factory=dict)
    one_at_a_time: list[str] = field(default_factory=list)
    tag: str = ""
    probes: str = ""
    skip_under: dict[str, str] = field(default_factory=dict)

    @property
    def needs_own_optima(self) -> bool:
        """If True, the panel is refused unless each arm is tuned."""
        return self.tuned_as == "own"

    @property
    def shares_optimum(self) -> bool:
        """If True, all arms have the values of the strategy `tuned_as`."""
        return self.tuned_as not in ("", "own")

    @property
    def baseline(self) -> ArmSpec | None:
        """The arm with which the others are compared."""
        return next((arm for arm in self.arms.values() if arm.baseline), None)


@dataclass(frozen=True)
class Tuned:
    """Optima of the arms of one model, found by the figure `tuning`.

    Attributes:
        source: command, seeds and commit of the runs
        optim: file of conf/optim of the runs; panels with a different one do not use the optima
        schedule: file of conf/schedule of the runs, likewise
        d_model: width of the model; other widths have the initial std times sqrt(d_model / width)
        arms: strategy -> key of `fit` -> value
        same_as: strategy that is not tuned -> the one of `arms` whose values it has; others have
            those of their placement
    """

    name: str
    source: str
    optim: str
    schedule: str
    d_model: int
    arms: dict[str, dict[str, float]]
    same_as: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class FigureSpec:
    """A figure or table of the paper.

    Attributes:
        section: section of the paper
        paper: quantity -> number of the paper
        paper_tokens_per_param: training tokens per parameter in the paper
        papers_protocol: if True, runs follow the protocol of the paper, so that intervals are
            compared with its numbers
    """

    name: str
    title: str
    section: str = field(default="A figure of your own", kw_only=True)
    summary: str
    panels: list[PanelSpec]
    paper: dict[str, str] = field(default_factory=dict)
    paper_tokens_per_param: str = "100"
    papers_protocol: bool = False


def figure_names(conf: Path = CONF) -> list[str]:
    """Return the names of all figures."""
    return _names(conf / "paper")


def budget_names(conf: Path = CONF) -> list[str]:
    """Return the names of all budgets."""
    return _names(conf / "paper" / "budgets")


def load_figure(name: str, conf: Path = CONF) -> FigureSpec:
    """Read conf/paper/NAME.yaml."""
    figure = read_as(FigureSpec, _file(name, conf / "paper", "figure"))
    known = budget_names(conf)
    for budget in _budgets_named(figure):
        expect_known(f"conf/paper/{name}.yaml: budget", budget, known)
    return figure


def _budgets_named(figure: FigureSpec) -> Iterator[str]:
    """Yield all names of budgets in a figure."""
    for panel in figure.panels:
        yield from panel.one_at_a_time
        specs: list[PanelSpec | ArmSpec] = [panel, *panel.arms.values()]
        for spec in specs:
            yield from (*spec.seeds, *spec.skip_under, *(spec.lr or ()))
            yield from chain.from_iterable(spec.axes.values())
        for claim in panel.claims:
            yield from claim.skip_under


def load_budget(name: str, conf: Path = CONF) -> Budget:
    """Read conf/paper/budgets/NAME.yaml."""
    return read_as(Budget, _file(name, conf / "paper" / "budgets", "budget"))


def load_tuned(name: str, conf: Path = CONF) -> Tuned | None:
    """Read conf/paper/tuned/NAME.yaml; None if it does not exist."""
    path = conf / "paper" / "tuned" / f"{name}.yaml"
    return read_as(Tuned, path) if path.is_file() else None


def _file(name: str, folder: Path, what: str) -> Path:
    expect_known(what, name, _names(folder))
    return folder / f"{name}.yaml"


def _names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


def values_under(budget: str, axes: Axes) -> dict[str, list[int | float]]:
    """Return key of a grid -> values under a budget, of the keys that have some."""
    return {key: values[budget] for key, values in axes.items() if budget in values}


def rounded(value: float) -> float:
    """Round to two digits; the errors are larger than the third."""
    return float(f"{value:.2g}")
