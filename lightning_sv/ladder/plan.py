"""What a ladder trains: rungs of one size, arms with a learning rate and std of their own, seeds."""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_sv.corpus import CorpusConfig
from lightning_sv.nn import BackboneConfig, activated_parameters, meta_backbone
from lightning_sv.optim import OptimConfig, ScheduleConfig
from lightning_sv.scale import ScaleStrategy
from lightning_sv.settings.yaml_file import read_as


@dataclass(frozen=True)
class Arm:
    """One strategy with what is tuned for it: peak learning rate and std of the initialization."""

    scale: str
    lr: float
    init_std: float

    @property
    def label(self) -> str:
        """The strategy in its canonical spelling."""
        return str(ScaleStrategy.parse(self.scale))


@dataclass(frozen=True)
class Rung:
    """Models of one size, all trained for the same tokens.

    Attributes:
        name: of the size, in run names
        backbone: sizes, as in conf/model; name and init_std are set here
        tokens_per_param: training budget per parameter of the first arm, which all arms get
        seeds: of initialization and order of the data; arms of one seed are a pair
        arms: the strategies; the first is the baseline
    """

    name: str
    backbone: dict[str, Any]
    tokens_per_param: float
    seeds: list[int]
    arms: list[Arm]


@dataclass(frozen=True)
class Tune:
    """A grid over learning rate and std for every arm, on a seed that no rung has, at fewer tokens."""

    tokens_per_param: float
    seed: int
    lr: list[float]
    init_std: list[float]


@dataclass(frozen=True)
class Ladder:
    """The whole study; keys are those of `fit` where it has them.

    Attributes:
        corpus: prepared if it is not there
        seq_len: tokens a sequence predicts
        global_batch: sequences an optimizer step
        rungs: trained one after another
        validations: in a run, the last at its end
        val_sequences: read by each validation, always the same
        log_every: optimizer steps between two written losses
        clip: bound of the gradient's norm
        schedule: of the learning rate
        optim: AdamW's settings; lr is each arm's
        tune: the grid of `--tune`
    """

    corpus: CorpusConfig
    seq_len: int
    global_batch: int
    rungs: list[Rung]
    validations: int = 20
    val_sequences: int = 512
    log_every: int = 20
    clip: float = 1.0
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    tune: Tune | None = None

    @property
    def tokens_per_step(self) -> int:
        """Training tokens of an optimizer step."""
        return self.global_batch * self.seq_len

    def grid(self) -> "Ladder":
        """The ladder that tunes: every arm of every rung with each rate and std of the grid.

        Raises:
            ValueError: the plan has no grid
        """
        if (tune := self.tune) is None:
            raise ValueError("--tune needs a section 'tune' in the plan: tokens_per_param, seed, lr, init_std.")
        rungs = []
        for rung in self.rungs:
            arms = [Arm(arm.scale, lr, std) for arm in rung.arms for lr in tune.lr for std in tune.init_std]
            rungs.append(replace(rung, tokens_per_param=tune.tokens_per_param, seeds=[tune.seed], arms=arms))
        return replace(self, rungs=rungs)

    def with_rates(self, found: dict[str, dict[str, dict[str, float]]]) -> "Ladder":
        """The ladder with the rates and stds that a grid found: rung -> arm's label -> {lr, init_std}."""
        rungs = []
        for rung in self.rungs:
            best = found.get(rung.name, {})
            arms = [Arm(arm.scale, **best[arm.label]) if arm.label in best else arm for arm in rung.arms]
            rungs.append(replace(rung, arms=arms))
        return replace(self, rungs=rungs)


@dataclass(frozen=True)
class RunPlan:
    """One model to train."""

    rung: Rung
    arm: Arm
    seed: int
    steps: int
    several: bool  # the rung has this strategy more than once: names say rate and std

    @property
    def name(self) -> str:
        """Folder of the run below those of all: size/strategy-seed."""
        tuned = f",lr={self.arm.lr:g},std={self.arm.init_std:g}" if self.several else ""
        return f"{self.rung.name}/{self.arm.label}{tuned}-seed{self.seed}"

    @property
    def backbone(self) -> BackboneConfig:
        """The model's sizes."""
        return BackboneConfig(**{**self.rung.backbone, "name": self.rung.name, "init_std": self.arm.init_std})


def runs_of(ladder: Ladder, rung: Rung) -> list[RunPlan]:
    """The runs of a rung, seed by seed, so that what a part completes are whole pairs."""
    first = rung.arms[0]
    config = BackboneConfig(**rung.backbone)
    parameters = activated_parameters(meta_backbone(config, first.scale), config)
    steps = max(1, -int(-rung.tokens_per_param * parameters // ladder.tokens_per_step))
    labels = [arm.label for arm in rung.arms]
    return [RunPlan(rung, arm, seed, steps, labels.count(arm.label) > 1) for seed in rung.seeds for arm in rung.arms]


def load_ladder(path: Path) -> Ladder:
    """Read a plan, see conf/ladder.

    Raises:
        ValueError: names the file, the key and what it must be
    """
    ladder = read_as(Ladder, path, _name_arms)
    _check(ladder, str(path))
    return ladder


def _name_arms(content: Any) -> None:
    """A file has each arm's rates by its strategy."""
    for rung in content.get("rungs") or ():
        rung["arms"] = [{"scale": scale, **rates} for scale, rates in rung["arms"].items()]


def _check(ladder: Ladder, where: str) -> None:
    if not ladder.rungs:
        raise ValueError(f"{where}: rungs is empty; name at least one size to train.")
    for rung in ladder.rungs:
        if not rung.arms or not rung.seeds or rung.tokens_per_param <= 0:
            raise ValueError(f"{where}: rung {rung.name} needs arms, seeds and a positive tokens_per_param.")
        for arm in rung.arms:
            if arm.lr <= 0:
                raise ValueError(f"{where}: rung {rung.name}: lr of {arm.scale} is {arm.lr}; it must be positive.")
        for run in runs_of(ladder, rung):
            if run.backbone.n_expert:
                raise ValueError(f"{where}: rung {rung.name} is a mixture of experts; a ladder trains dense models.")
            meta_backbone(run.backbone, run.arm.scale)
    if ladder.optim.name != "adamw" or ladder.optim.lr is not None:
        raise ValueError(f"{where}: optim sets AdamW's decay and betas; its lr belongs to the arms.")
    for key in ("seq_len", "global_batch", "validations", "val_sequences", "log_every"):
        if getattr(ladder, key) < 1:
            raise ValueError(f"{where}: {key} is {getattr(ladder, key)}; it must be at least 1.")


def plain(ladder: Ladder) -> dict[str, Any]:
    """The plan as values for JSON, by which a checkpoint knows that it is of this plan."""
    values: dict[str, Any] = asdict(ladder)
    values["corpus"] = ladder.corpus.settings()
    return values
