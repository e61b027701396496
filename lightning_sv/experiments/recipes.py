"""An arm of a figure, settled under a budget: arguments of `fit`, steps, tokens, and what a run of it takes."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lightning_sv.errors import ConfigError, unknown
from lightning_sv.experiments.sources.figures import load_tuned, tuned_keys
from lightning_sv.experiments.spec import CONF, ArmSpec, Budget, ModelSpec, PanelSpec, Recipe
from lightning_sv.nn.gpus import find_gpu
from lightning_sv.plan.plan import plan_steps, train_hours
from lightning_sv.runs.directory import LAST
from lightning_sv.settings.parse import parse_run
from lightning_sv.settings.words import words_of
from lightning_sv.settings.yaml_file import read_yaml
from lightning_sv.whole import file_sha256

#: share of a GPU's peak that hours are given for; the middle of `lightning_sv.plan.MFUS`
MFU = 0.4


class Recipes:
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
        self._made: dict[str, Recipe] = {}
        self._steps = cache(_steps)

    def model(self, role: str) -> ModelSpec | str:
        """The model of a role, or why this budget has none.

        Raises:
            ConfigError: the budget says nothing of the role
        """
        if role in self.budget.models:
            return self.budget.models[role]
        if role not in self.budget.lacks:
            known = [*self.budget.models, *self.budget.lacks]
            raise ConfigError(unknown(f"budget {self.budget.name}: model", role, known))
        return self.budget.lacks[role]

    def make(self, panel: PanelSpec, arm: ArmSpec, role: str, more: Mapping[str, Any] | None = None) -> Recipe:
        """Settle one arm.

        Args:
            panel: the panel that the arm is in
            arm: as the figure's YAML has it
            role: which of the budget's models it trains
            more: further keys: a value of a grid

        Raises:
            ConfigError: what `fit` would refuse
        """
        model = self.model(role)
        of = model if panel.kind == "scaling" or arm.model is None else self.model(panel.model)
        assert isinstance(model, ModelSpec) and isinstance(of, ModelSpec), role
        rates = (panel.lr or {}) | arm.lr
        lr = {"model.optim.lr": rates[self.budget.name]} if self.budget.name in rates else {}
        own = {**arm.set, **(more or {}), **self.extra, **lr}
        paths, given = self._layers(panel, model, own)
        tuned, note = self._tuned(panel, arm, model, paths, given)
        paths, given = self._layers(panel, model, own, tuned)
        asked = json.dumps([[str(p) for p in paths], given, arm.scale, arm.longer], sort_keys=True)
        if asked not in self._made:
            paths_of, given_of = self._layers(panel, of, self.extra)
            of_llama = self._steps(*_configs(paths_of), *words_of(given_of))
            # what an arm itself says of them counts
            steps = int(arm.set.get("trainer.max_steps", round(of_llama * arm.longer)))
            made = self._make(paths, given, arm, model, panel, steps)
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
        self, panel: PanelSpec, arm: ArmSpec, model: ModelSpec, paths: list[Path], given: Mapping[str, Any]
    ) -> tuple[dict[str, float], str]:
        """The optimum that an arm has, or that all share, and a sentence on it."""
        wanted = model.tuned and panel.kind != "grid" and panel.lr is None
        tuned = load_tuned(model.tuned, self.conf) if wanted else None
        if tuned is None or (tuned.optim, tuned.schedule) != (panel.optim, panel.schedule):
            return {}, ""
        shared = panel.tuned_as not in ("", "own")
        words = [*_configs(paths), *words_of(given)]
        scale = panel.tuned_as if shared else arm.scale
        module, _, _ = parse_run([*words, "--model.scale", scale], check_corpus=False)
        exceptions = "" if shared else module.scale_options.label()
        label = f"{module.strategy}{exceptions}"
        found, note = tuned_keys(tuned, module.strategy, label, module.config.d_model)
        return found, f"All arms have the learning rate and the initial std of {label}." if shared else note

    def _layers(
        self,
        panel: PanelSpec,
        model: ModelSpec,
        more: Mapping[str, Any],
        tuned: Mapping[str, float] | None = None,
    ) -> tuple[list[Path], dict[str, Any]]:
        files = ["base", f"optim/{panel.optim}", f"schedule/{panel.schedule}", *self.budget.layers]
        files += [f"model/{model.config}", *([f"probes/{panel.probes}"] if panel.probes else [])]
        paths = [self.conf / f"{file}.yaml" for file in files]
        keys = {**self.budget.set, **model.set, **(tuned or {}), **panel.set, **more}
        return paths if self.files is None else list(self.files), keys

    def _make(
        self, paths: list[Path], given: dict[str, Any], arm: ArmSpec, model: ModelSpec, panel: PanelSpec, steps: int
    ) -> Recipe:
        layered = OmegaConf.merge({}, *(read_yaml(path, f"--config {path}") for path in paths))
        # what a file says already is not said again: one configuration, one command
        changes = {k: v for k, v in sorted(given.items()) if OmegaConf.select(layered, k) != v}
        words = [*_configs(paths), *words_of(changes)]
        module, data, trainer = parse_run([*words, "--model.scale", arm.scale], check_corpus=False)
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
        seconds = gpu_hours = None
        if self.budget.gpu is not None:
            peak = find_gpu(self.budget.gpu).peak(str(trainer["precision"]))
            flops = module.flops_per_token(data.seq_len)
            gpu_hours = train_hours(tokens, flops, 1, peak, MFU)
        elif model.seconds_per_1000_steps is None:
            raise ConfigError(
                f"budget {self.budget.name}: model {model.config} has no seconds_per_1000_steps; "
                "add those of one core for 1,000 steps of llama."
            )
        else:
            slower = self.budget.relative_step_time
            seconds = model.seconds_per_1000_steps * steps / 1000
            seconds *= math.prod(slower.get(x, 1.0) for x in (module.strategy.placement, panel.optim, panel.probes))
        strategy = f"{strategy}{module.scale_options.label()}"
        details = ", ".join([f"{module.optim.name} {module.schedule.name}", f"lr {module.lr:g}", *told, *probes])
        return Recipe(
            model=module.config.name,
            strategy=strategy,
            details=details,
            args=(*_configs(paths), *words_of({**changes, **settled})),
            identity=json.dumps(identity, sort_keys=True),
            steps=steps,
            tokens=tokens,
            parameters=module.n_activated,
            seconds=seconds,
            gpu_hours=gpu_hours,
            title=f"{module.config.name}, {strategy}, {details}, {steps:,} steps",
            note=model.note,
        )


def _steps(*words: str) -> int:
    """Steps of `llama`, for every arm: a few scale vectors more must not give an arm more of them."""
    return plan_steps(*parse_run([*words, "--model.scale", "llama"], check_corpus=False))


def _configs(paths: Sequence[Path]) -> list[str]:
    return [word for path in paths for word in ("--config", path.as_posix())]


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
