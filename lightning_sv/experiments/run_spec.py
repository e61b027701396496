"""What a run trains: an arm of a figure, resolved under a budget to arguments of `fit`, steps, tokens and time."""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lightning_sv.atomic import file_sha256
from lightning_sv.errors import ConfigError, unknown
from lightning_sv.experiments.sources.from_yaml import load_tuned, tuned_keys
from lightning_sv.experiments.spec import CONF, ArmSpec, Budget, ModelSpec, PanelSpec
from lightning_sv.nn.gpus import find_gpu
from lightning_sv.plan.plan import plan_steps, train_hours
from lightning_sv.runs.directory import LAST
from lightning_sv.settings.cli_args import to_args
from lightning_sv.settings.parse import parse_run
from lightning_sv.settings.yaml_file import read_yaml

#: share of a GPU's peak that hours are given for; the middle of `lightning_sv.plan.MFUS`
MFU = 0.4


@dataclass(frozen=True)
class RunSpec:
    """Everything that decides the runs of an arm but their seed. Arms of equal configuration are trained once.

    Attributes:
        details: optimizer, schedule and the values that differ from the model's file, for a reader
        args: of `fit`, without seed and directory
        identity: the configuration as JSON: all that its YAML and arguments say, without the defaults of the code
        parameters: activated parameters
        cost: seconds of one core; under a budget with a GPU, GPU-hours at `MFU`
        note: what a reader of the losses of its model must know
    """

    model: str
    strategy: str
    details: str
    args: tuple[str, ...]
    identity: str
    steps: int
    tokens: int
    parameters: int
    cost: float
    title: str
    note: str = ""

    @property
    def tokens_per_param(self) -> float:
        """Training tokens per activated parameter; 100 in the paper."""
        return self.tokens / self.parameters

    def key(self, seed: int) -> str:
        """Name of the run's directory: readable, and a hash of what decides the result."""
        digest = hashlib.sha256(f"{self.identity} {seed}".encode()).hexdigest()[:10]
        return re.sub(r"[^\w.+-]+", "_", f"{self.model}-{self.strategy}-seed{seed}-{digest}")


class RunResolver:
    """Settles arms under one budget.

    Args:
        budget: what they may spend
        extra: further keys of every run, e.g. `data.corpus.dir`
        conf: the folder of all YAML
        files: of every run, in place of those that panel, budget and model name
    """

    def __init__(
        self, budget: Budget, extra: Mapping[str, Any], conf: Path = CONF, files: Sequence[Path] | None = None
    ):
        self.budget, self.extra, self.conf, self.files = budget, dict(extra), conf, files
        self._made: dict[str, RunSpec] = {}
        self._steps = cache(_steps)

    def model(self, role: str) -> ModelSpec | str:
        """The model of a role, or why this budget has none.

        Raises:
            ConfigError: the budget says nothing of the role
        """
        if role in self.budget.models:
            return self.budget.models[role]
        if role not in self.budget.unavailable:
            known = [*self.budget.models, *self.budget.unavailable]
            raise ConfigError(unknown(f"budget {self.budget.name}: model", role, known))
        return self.budget.unavailable[role]

    def resolve(self, panel: PanelSpec, arm: ArmSpec, role: str, more: Mapping[str, Any] | None = None) -> RunSpec:
        """Settle one arm.

        Raises:
            ConfigError: what `fit` would refuse
        """
        model = self.model(role)
        of = model if panel.kind == "scaling" or arm.model is None else self.model(panel.model)
        assert isinstance(model, ModelSpec) and isinstance(of, ModelSpec), role
        rates = (panel.lr or {}) | (arm.lr or {})
        lr = {"model.optim.lr": rates[self.budget.name]} if self.budget.name in rates else {}
        paths, below = self._paths(panel, model), {**self.budget.overrides, **model.overrides}
        above = {**panel.overrides, **arm.overrides, **(more or {}), **self.extra, **lr}
        tuned, note = self._tuned(panel, arm, model, _args(paths, below | above))
        keys = below | tuned | above
        asked = json.dumps([[str(p) for p in paths], keys, arm.scale, arm.longer], sort_keys=True)
        if asked not in self._made:
            llama = {**self.budget.overrides, **of.overrides, **panel.overrides, **self.extra}
            steps = round(self._steps(*_args(self._paths(panel, of), llama)) * arm.longer)
            steps = int(arm.overrides.get("trainer.max_steps", steps))  # what an arm itself says of them counts
            made = self._resolve(paths, keys, arm, model, panel, steps)
            self._made[asked] = replace(made, note=" ".join(filter(None, (made.note, note))))
        return self._made[asked]

    def untuned(self, panel: PanelSpec, model: ModelSpec) -> str | None:
        """Why the arms of a panel have no optima of their own, where they want them."""
        if not model.tuned and panel.tuned_as == "own":
            return f"the optimum of each arm is not known for {model.config}"
        if not model.tuned or panel.lr is not None or panel.kind == "grid" or load_tuned(model.tuned, self.conf):
            return None
        return f"conf/paper/tuned/{model.tuned}.yaml is not there yet, the figure tuning writes it"

    def _tuned(
        self, panel: PanelSpec, arm: ArmSpec, model: ModelSpec, args: Sequence[str]
    ) -> tuple[dict[str, float], str]:
        """The optimum that an arm has, or that all share, and a sentence on it."""
        wanted = model.tuned and panel.kind != "grid" and panel.lr is None
        tuned = load_tuned(model.tuned, self.conf) if wanted else None
        if tuned is None or (tuned.optim, tuned.schedule) != (panel.optim, panel.schedule):
            return {}, ""
        shared = panel.tuned_as not in ("", "own")
        scale = panel.tuned_as if shared else arm.scale
        module, _, _ = parse_run([*args, "--model.scale", scale], check_corpus=False)
        exceptions = "" if shared else module.scale_options.label()
        label = f"{module.strategy}{exceptions}"
        found, note = tuned_keys(tuned, module.strategy, label, module.backbone.d_model)
        return found, f"All arms have the learning rate and the initial std of {label}." if shared else note

    def _paths(self, panel: PanelSpec, model: ModelSpec) -> list[Path]:
        if self.files is not None:
            return list(self.files)
        files = ["base", f"optim/{panel.optim}", f"schedule/{panel.schedule}", *self.budget.layers]
        files += [f"model/{model.config}", *([f"probes/{panel.probes}"] if panel.probes else [])]
        return [self.conf / f"{file}.yaml" for file in files]

    def _resolve(
        self, paths: list[Path], keys: dict[str, Any], arm: ArmSpec, model: ModelSpec, panel: PanelSpec, steps: int
    ) -> RunSpec:
        layered = OmegaConf.merge({}, *(read_yaml(path, f"--config {path}") for path in paths))
        # what a file says already is not said again: one configuration, one command
        changes = {k: v for k, v in sorted(keys.items()) if OmegaConf.select(layered, k) != v}
        module, data, trainer = parse_run([*_args(paths, changes), "--model.scale", arm.scale], check_corpus=False)
        exceptions = any(k.startswith("model.scale_options") for k in changes)
        strategy = str(module.strategy if exceptions else module.canonical)
        settled = {"model.optim.lr": module.lr, "model.scale": strategy, "trainer.max_steps": steps}
        for key, value in {**changes, **settled}.items():
            OmegaConf.update(layered, key, value, force_add=True)
        identity = OmegaConf.to_container(layered)
        assert isinstance(identity, dict)
        identity.pop("seed_everything", None)
        if module.init_from is not None:
            identity["model"]["init_from"] = _content(module.init_from)  # type: ignore[index]
        hidden = ("model.optim.lr", "model.backbone.name", "model.scale_options")
        shown = {k: v for k, v in changes.items() if k.startswith("model.") and not k.startswith(hidden)}
        told = [f"{k.rpartition('.')[2]} {v}" for k, v in shown.items()]
        probes = [f"probes {panel.probes}"] if panel.probes else []
        tokens = steps * data.tokens_per_step
        if self.budget.gpu is not None:
            peak = find_gpu(self.budget.gpu).peak(str(trainer["precision"]))
            flops = module.flops_per_token(data.seq_len)
            cost = train_hours(tokens, flops, 1, peak, MFU)
        elif model.seconds_per_1000_steps is None:
            raise ConfigError(
                f"budget {self.budget.name}: model {model.config} has no seconds_per_1000_steps; "
                "add those of one core for 1,000 steps of llama."
            )
        else:
            slower = self.budget.relative_step_time
            cost = model.seconds_per_1000_steps * steps / 1000
            cost *= math.prod(slower.get(x, 1.0) for x in (module.strategy.placement, panel.optim, panel.probes))
        strategy = f"{strategy}{module.scale_options.label()}"
        details = ", ".join([f"{module.optim.name} {module.schedule.name}", f"lr {module.lr:g}", *told, *probes])
        return RunSpec(
            model=module.backbone.name,
            strategy=strategy,
            details=details,
            args=tuple(_args(paths, changes | settled)),
            identity=json.dumps(identity, sort_keys=True),
            steps=steps,
            tokens=tokens,
            parameters=module.n_activated,
            cost=cost,
            title=f"{module.backbone.name}, {strategy}, {details}, {steps:,} steps",
            note=model.note,
        )


def _steps(*words: str) -> int:
    """Steps of `llama`, for every arm: a few scale vectors more must not give an arm more of them."""
    return plan_steps(*parse_run([*words, "--model.scale", "llama"], check_corpus=False))


def _args(paths: Sequence[Path], keys: Mapping[str, Any]) -> list[str]:
    return [*(word for path in paths for word in ("--config", path.as_posix())), *to_args(keys)]


@cache
def _content(init_from: str) -> str:
    """Return the hash of the checkpoint that a run starts from: at its path another may come to lie.

    Raises:
        ConfigError: there is none
    """
    path = Path(init_from) / LAST if Path(init_from).is_dir() else Path(init_from)
    if not path.is_file():
        raise ConfigError(f"model.init_from: no checkpoint at {path}; give the path of one, RUN/{LAST}.")
    return file_sha256(path)
