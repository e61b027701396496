"""Arms of figures, resolved under a budget to arguments of `fit`, steps, tokens and time."""

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
from lightning_sv.errors import ConfigError, expect, expect_known
from lightning_sv.experiments.spec import CONF, ArmSpec, Budget, ModelSpec, PanelSpec, Tuned, load_tuned, rounded
from lightning_sv.gpus import find_gpu
from lightning_sv.lit.run_arguments import parse_run
from lightning_sv.plan.plan import plan_steps, train_hours
from lightning_sv.runs.directory import LAST
from lightning_sv.scale import ScaleOptions, ScaleStrategy, expand_preset
from lightning_sv.settings.yaml_file import read_yaml, to_args

#: model FLOPs utilization in estimates of hours; the middle of `lightning_sv.plan.MFUS`
MFU = 0.4
_STD = "model.backbone.init_std"
_ABSENT = object()


@dataclass(frozen=True)
class RunSpec:
    """Configuration of the runs of an arm without their seed. Arms of equal configuration are trained once.

    Attributes:
        details: optimizer, schedule and the values that differ from the file of the model, as text
        args: arguments of `fit`, without seed and directory
        identity: configuration from YAML and arguments as JSON, without defaults of the code
        parameters: activated parameters
        cost: seconds of one core; under a budget with a GPU, GPU-hours at `MFU`
        note: sentence for readers of the losses
        epochs: tokens over those of the training split; None if the corpus is not on this machine
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
    epochs: float | None = None

    @property
    def tokens_per_param(self) -> float:
        """Training tokens per activated parameter; 100 in the paper."""
        return self.tokens / self.parameters

    def key(self, seed: int) -> str:
        """Return the name of the run directory: readable, with a hash of the configuration and seed."""
        digest = hashlib.sha256(f"{self.identity} {seed}".encode()).hexdigest()[:10]
        return re.sub(r"[^\w.+-]+", "_", f"{self.model}-{self.strategy}-seed{seed}-{digest}")


class RunResolver:
    """Resolves arms under one budget.

    `extra` has more keys of all runs, e.g. `data.corpus.dir`. `files` are the YAML files of all runs, instead of those
    that panel, budget and model name.
    """

    def __init__(
        self, budget: Budget, extra: Mapping[str, Any], conf: Path = CONF, files: Sequence[Path] | None = None
    ):
        self.budget, self.extra, self.conf, self.files = budget, dict(extra), conf, files
        self._resolved: dict[str, RunSpec] = {}
        self._steps = cache(_steps)

    def model(self, role: str) -> ModelSpec | str:
        """Return the model of a role, or why this budget has none."""
        models: dict[str, ModelSpec | str] = {**self.budget.unavailable, **self.budget.models}
        expect_known(f"budget {self.budget.name}: model", role, models)
        return models[role]

    def resolve(self, panel: PanelSpec, arm: ArmSpec, role: str, more: Mapping[str, Any] | None = None) -> RunSpec:
        """Resolve one arm."""
        arm = without_preset(arm)
        model = self.model(role)
        reference = model if arm.model is None else self.model(panel.model)
        assert isinstance(model, ModelSpec) and isinstance(reference, ModelSpec), role
        rates = (panel.lr or {}) | (arm.lr or {})
        lr = {"model.optim.lr": rates[self.budget.name]} if self.budget.name in rates else {}
        paths, below = self._paths(panel, model), {**self.budget.overrides, **model.overrides}
        for key in more or {}:
            expect(key not in self.extra, f"--{key}", self.extra.get(key), "no value, because it is an axis of a grid.")
        above = {**panel.overrides, **arm.overrides, **(more or {}), **lr, **self.extra}
        tuned, note = self._tuned(panel, arm, model, _args(paths, below | above))
        keys = below | tuned | above
        request = json.dumps([[str(p) for p in paths], keys, arm.scale, arm.longer], sort_keys=True)
        if request not in self._resolved:
            llama = {**self.budget.overrides, **reference.overrides, **panel.overrides, **self.extra}
            steps = round(self._steps(*_args(self._paths(panel, reference), llama)) * arm.longer)
            if "trainer.max_steps" not in self.extra:
                steps = int(arm.overrides.get("trainer.max_steps", steps))
            resolved = self._resolve(paths, keys, arm, model, panel, steps)
            self._resolved[request] = replace(resolved, note=" ".join(filter(None, (resolved.note, note))))
        return self._resolved[request]

    def untuned(self, panel: PanelSpec, model: ModelSpec) -> str | None:
        """Return why the arms of a panel do not have their own optima; None if they do, or if the panel sets values."""
        if not model.tuned and panel.tuned_as == "own":
            return f"the optimum of each arm is not known for {model.config}"
        if not self._uses_tuned(panel, model) or load_tuned(model.tuned, self.conf):
            return None
        command = f"lightning-sv paper --budget {self.budget.name} --fig tuning"
        return f"conf/paper/tuned/{model.tuned}.yaml does not exist yet; `{command}` writes it, to be copied there"

    def _uses_tuned(self, panel: PanelSpec, model: ModelSpec) -> bool:
        """Return whether arms of a panel have tuned values: the budget has some, and the panel sets or varies none."""
        return bool(model.tuned) and panel.lr is None and not panel.axes

    def _tuned(
        self, panel: PanelSpec, arm: ArmSpec, model: ModelSpec, args: Sequence[str]
    ) -> tuple[dict[str, float], str]:
        """Return the optimum of an arm, or that of all arms, and a sentence on it."""
        tuned = load_tuned(model.tuned, self.conf) if self._uses_tuned(panel, model) else None
        if tuned is None or (tuned.optim, tuned.schedule) != (panel.optim, panel.schedule):
            return {}, ""
        shared = panel.tuned_as not in ("", "own")
        module, _, _ = parse_run([*args, "--model.scale", panel.tuned_as if shared else arm.scale], check_corpus=False)
        exceptions = "" if shared else module.scale_options.label()
        strategy = module.strategy if exceptions else module.plan.canonical  # as `_resolve` names the arm
        label = f"{strategy}{exceptions}"
        values, note = tuned_keys(tuned, strategy, label, module.backbone.d_model)
        return values, f"All arms have the learning rate and the initial std of {label}." if shared else note

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
        for key in keys:  # their order is lost, so that it is unknown which one counts
            inner = next((other for other in keys if other.startswith(f"{key}.")), None)
            wanted = f"no value, because --{inner} is set. Set its entries instead."
            expect(inner is None, f"--{key}", keys[key], wanted)
        # values that equal those of the files are dropped, so that one configuration has one command
        changes = {k: v for k, v in sorted(keys.items()) if OmegaConf.select(layered, k, default=_ABSENT) != v}
        module, data, trainer = parse_run([*_args(paths, changes), "--model.scale", arm.scale], check_corpus=False)
        for key, seed in (("model.seed", module.seed), ("data.seed", data.seed)):
            expect(seed is None, key, seed, "null, because runs of different seeds would share weights or batches.")
        exceptions = any(k.startswith("model.scale_options") for k in changes)
        strategy = str(module.strategy if exceptions else module.plan.canonical)
        settled = {"model.optim.lr": module.plan.lr, "model.scale": strategy, "trainer.max_steps": steps}
        for key, value in {**changes, **settled}.items():
            OmegaConf.update(layered, key, value, merge=False, force_add=True)
        identity = OmegaConf.to_container(layered)
        assert isinstance(identity, dict)
        identity.pop("seed_everything", None)
        if not identity["data"].get("full_last_validation"):  # type: ignore[index,union-attr]
            # so that runs keep the names under which they were recorded before this key existed
            identity["data"].pop("full_last_validation", None)  # type: ignore[index,union-attr]
        if module.init_from is not None:
            identity["model"]["init_from"] = _content(module.init_from)  # type: ignore[index]
        hidden = ("model.optim.lr", "model.backbone.name", "model.scale_options")
        named = ("model.", "trainer.gradient_clip_val")
        shown = {k: v for k, v in changes.items() if k.startswith(named) and not k.startswith(hidden)}
        told = [f"{k.rpartition('.')[2]} {v}" for k, v in shown.items()]
        probes = [f"probes {panel.probes}"] if panel.probes else []
        tokens = steps * data.tokens_per_step
        if self.budget.gpu is not None:
            peak = find_gpu(self.budget.gpu).peak(str(trainer["precision"]))
            cost = train_hours(tokens, module.plan.flops_per_token(data.seq_len), 1, peak, MFU)
        elif model.seconds_per_1000_steps is None:
            hint = "add those of one core for 1,000 steps of llama."
            raise ConfigError(f"budget {self.budget.name}: model {model.config} has no seconds_per_1000_steps; {hint}")
        else:
            slower = self.budget.relative_step_time
            cost = model.seconds_per_1000_steps * steps / 1000
            cost *= math.prod(slower.get(x, 1.0) for x in (module.strategy.placement, panel.optim, panel.probes))
        strategy = f"{strategy}{module.scale_options.label()}"
        details = ", ".join([f"{module.optim.name} {module.schedule.name}", f"lr {module.plan.lr:g}", *told, *probes])
        return RunSpec(
            model=module.backbone.name,
            strategy=strategy,
            details=details,
            args=tuple(_args(paths, changes | settled)),
            identity=json.dumps(identity, sort_keys=True),
            steps=steps,
            tokens=tokens,
            parameters=module.plan.n_activated,
            cost=cost,
            title=f"{module.backbone.name}, {strategy}, {details}, {steps:,} steps",
            note=model.note,
            epochs=data.epochs(tokens) if data.is_prepared else None,
        )


def without_preset(arm: ArmSpec) -> ArmSpec:
    """Return the arm with words and keys instead of a preset, so that equal arms are one run."""
    scale, options = expand_preset(arm.scale, ScaleOptions())
    placements = {f"model.scale_options.placement_at.{site}": word for site, word in options.placement_at.items()}
    return replace(arm, scale=str(scale), overrides={**placements, **arm.overrides})


def _steps(*words: str) -> int:
    """Return the steps of `llama`, so that arms with more scale vectors do not get more steps."""
    any_rate = ["--model.optim.lr", "1"]
    return plan_steps(*parse_run([*words, "--model.scale", "llama", *any_rate], check_corpus=False))


def _args(paths: Sequence[Path], keys: Mapping[str, Any]) -> list[str]:
    return [*(word for path in paths for word in ("--config", path.as_posix())), *to_args(keys)]


def tuned_keys(tuned: Tuned, strategy: ScaleStrategy, label: str, d_model: int) -> tuple[dict[str, float], str]:
    """Return the values of an arm, and a sentence if they are those of a related arm.

    The related arm is the tuned one of the same strategy with most of its exceptions and no other, else the one that
    has a norm after the matrix or scale vectors at the same sides.

    Raises:
        ConfigError: neither the arm nor its related arm is tuned
    """
    row = strategy.placement_row
    unscaled = "llama" if row.scale_in else "nop"
    of_placement = "hg+dnp+or+iwd" if row.norm_out else "hg+dp+or" if row.scale_out else unscaled
    related = [name for name in tuned.arms if _split(name)[0] == str(strategy) and _split(name)[1] <= _split(label)[1]]
    source = max(related, key=lambda name: len(_split(name)[1]), default=of_placement)
    if source not in tuned.arms:
        command = tuned.source.partition(";")[0]
        hint = f"Add the arm to conf/paper/tuning.yaml, and run `{command}`."
        missing = f"has no values for {label}, nor for {of_placement!r}"
        raise ConfigError(f"conf/paper/tuned/{tuned.name}.yaml {missing}; expected some. {hint}")
    values = dict(tuned.arms[source])
    if _STD in values and d_model != tuned.d_model:
        values[_STD] = rounded(values[_STD] * math.sqrt(tuned.d_model / d_model))
    return values, "" if source == label else f"{label} is not tuned itself: it has the values of {source}."


def _split(label: str) -> tuple[str, frozenset[str]]:
    """Split `hg+or[lm_head=dp]` into the strategy and its exceptions."""
    strategy, _, exceptions = label.rstrip("]").partition("[")
    return strategy, frozenset(filter(None, exceptions.split(",")))


@cache
def _content(init_from: str) -> str:
    """Return the hash of the checkpoint that a run starts from, because the file at its path may change."""
    path = Path(init_from) / LAST if Path(init_from).is_dir() else Path(init_from)
    expect(path.is_file(), "model.init_from", init_from, f"a checkpoint at {path}. Set it to RUN/{LAST}.")
    return file_sha256(path)
