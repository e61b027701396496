"""Arms of conf/paper, resolved under a budget to runs with steps, tokens and time."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from lightning_sv.errors import ConfigError, expect_known
from lightning_sv.experiments.run_spec import (
    ParsedRun,
    RunConfig,
    RunSpec,
    fit_args,
    without_preset,
)
from lightning_sv.experiments.spec import (
    CONF,
    ArmSpec,
    Budget,
    ModelSpec,
    PanelSpec,
    Tuned,
    load_tuned,
)
from lightning_sv.experiments.tuned_values import TunedKeys, tuned_keys
from lightning_sv.gpus import find_gpu
from lightning_sv.lit.run_arguments import parse_run
from lightning_sv.plan.plan import plan_steps, train_hours
from lightning_sv.scale import ScaleStrategy

#: model FLOPs utilization in estimates of hours; the middle of `lightning_sv.plan.MFUS`
MFU = 0.4


class RunResolver:
    """Resolves arms under one budget.

    Args:
        budget: files, keys and models
        extra: more keys of all runs, e.g. `data.corpus.dir`
        conf: folder of the files
    """

    def __init__(self, budget: Budget, extra: Mapping[str, Any], conf: Path = CONF):
        self.budget = budget
        self.extra = dict(extra)
        self.conf = conf
        # Parsing a run takes 0.06 seconds, and panels and figures share many runs.
        self._parsed: dict[str, ParsedRun] = {}
        self._llama_steps = cache(_llama_steps)

    def why_no_model(self, role: str) -> str | None:
        """Return why this budget has no model for a role; None if it has one."""
        budget = self.budget
        roles = [*budget.unavailable, *budget.models]
        expect_known(f"budget {budget.name}: model", role, roles)
        if role in budget.models:
            return None
        return budget.unavailable[role]

    def resolve(
        self,
        panel: PanelSpec,
        arm: ArmSpec,
        role: str,
        point: Mapping[str, Any] | None = None,
    ) -> RunSpec:
        """Resolve one arm.

        Args:
            panel: panel of the arm
            arm: strategy and keys
            role: role of its model, which the budget has
            point: values of a grid

        Raises:
            ConfigError: the command line sets an axis of the grid
        """
        point = point or {}
        for key in point.keys() & self.extra.keys():
            expected = "no value, because it is an axis of a grid."
            raise ConfigError(f"--{key} is {self.extra[key]}; expected {expected}")

        arm = without_preset(arm)
        model = self.budget.models[role]
        defaults = {**self.budget.overrides, **model.overrides}
        rate = self._own_rate(panel, arm)
        settings = {**panel.overrides, **arm.overrides, **point, **rate, **self.extra}
        untuned = RunConfig(self._files(panel, model), {**defaults, **settings}, arm.scale)
        # tuned values depend on the model that the other settings define, and do not replace them
        optimum = self._optimum(panel, untuned, model)
        run = self._parse(replace(untuned, keys={**defaults, **optimum.keys, **settings}))

        steps = self._steps(panel, arm, role)
        cost = self._cost(run, steps, panel, model)
        note = f"{model.note} {optimum.note}".strip()
        return run.spec(steps, cost, note, panel.probes)

    def _parse(self, config: RunConfig) -> ParsedRun:
        key = json.dumps([list(map(str, config.files)), config.keys, config.scale], sort_keys=True)
        if key not in self._parsed:
            self._parsed[key] = config.parse()
        return self._parsed[key]

    def why_untuned(self, panel: PanelSpec, model: ModelSpec) -> str | None:
        """Return why the arms of a panel do not have their own optima.

        None if they do, or if the panel sets values.
        """
        if panel.needs_own_optima and not model.tuned:
            return f"the optimum of each arm is not known for {model.config}"
        is_tuned = self._tuned(panel, model) is not None
        if is_tuned or not _uses_tuned(panel, model):
            return None

        file = f"conf/paper/tuned/{model.tuned}.yaml"
        command = f"lightning-sv paper --budget {self.budget.name} --fig tuning"
        return f"{file} does not exist yet; `{command}` writes it, to be copied there"

    def _files(self, panel: PanelSpec, model: ModelSpec) -> list[Path]:
        names = ["base", f"optim/{panel.optim}", f"schedule/{panel.schedule}"]
        names += [*self.budget.layers, f"model/{model.config}"]
        if panel.probes:
            names.append(f"probes/{panel.probes}")
        return [self.conf / f"{name}.yaml" for name in names]

    def _own_rate(self, panel: PanelSpec, arm: ArmSpec) -> dict[str, float]:
        """Return the learning rate that arm or panel give for the budget."""
        rates = arm.lr or panel.lr or {}
        if self.budget.name not in rates:
            return {}
        return {"model.optim.lr": rates[self.budget.name]}

    def _tuned(self, panel: PanelSpec, model: ModelSpec) -> Tuned | None:
        """Return the optima that a panel uses; None if it uses none or their file is missing."""
        if not _uses_tuned(panel, model):
            return None
        return load_tuned(model.tuned, self.conf)

    def _optimum(self, panel: PanelSpec, config: RunConfig, model: ModelSpec) -> TunedKeys:
        """Return the tuned values of an arm; none if its panel uses none."""
        tuned = self._tuned(panel, model)
        if tuned is None or (tuned.optim, tuned.schedule) != (panel.optim, panel.schedule):
            return TunedKeys({}, "")
        if not panel.shares_optimum:
            run = self._parse(config)
            own = ScaleStrategy.parse(run.strategy)
            return tuned_keys(tuned, own, run.label, run.model.backbone.d_model)

        run = self._parse(replace(config, scale=panel.tuned_as))
        shared = run.model.plan.canonical  # whatever exceptions the arm has
        values = tuned_keys(tuned, shared, str(shared), run.model.backbone.d_model)
        note = f"All arms have the learning rate and the initial std of {shared}."
        return values._replace(note=note)

    def _steps(self, panel: PanelSpec, arm: ArmSpec, role: str) -> int:
        """Return the steps of an arm: those of llama in its panel, times `longer`.

        Arms with more scale vectors, or with a model of their own, do not get more steps.
        """
        if arm.model is not None:
            role = panel.model
        model = self.budget.models[role]
        keys = {**self.budget.overrides, **model.overrides, **panel.overrides, **self.extra}
        steps = self._llama_steps(*fit_args(self._files(panel, model), keys))
        return round(steps * arm.longer)

    def _cost(self, run: ParsedRun, steps: int, panel: PanelSpec, model: ModelSpec) -> float:
        """Return the time of a run, in the unit of `RunSpec.cost`.

        It is that at `MFU`, or the measured time of llama with the factors of slower steps.

        Raises:
            ConfigError: the budget has neither a GPU nor a measured time
        """
        startup = self.budget.startup_seconds
        if self.budget.gpu is not None:
            peak = find_gpu(self.budget.gpu).peak(str(run.trainer["precision"]))
            flops = run.model.plan.flops_per_token(run.data.seq_len)
            hours = train_hours(steps * run.data.tokens_per_step, flops, 1, peak, MFU)
            return hours + startup / 3600

        if model.seconds_per_1000_steps is None:
            found = f"model {model.config} has no seconds_per_1000_steps"
            hint = "add those of one core for 1,000 steps of llama."
            raise ConfigError(f"budget {self.budget.name}: {found}; {hint}")
        factors = self.budget.relative_step_time
        names = (run.model.strategy.placement, panel.optim, panel.probes)
        slower = math.prod(factors.get(name, 1.0) for name in names)
        return model.seconds_per_1000_steps * steps / 1000 * slower + startup


def _uses_tuned(panel: PanelSpec, model: ModelSpec) -> bool:
    """Return True if the budget has tuned values and the panel sets or varies none."""
    return bool(model.tuned) and panel.lr is None and not panel.axes


def _llama_steps(*args: str) -> int:
    any_rate = ["--model.optim.lr", "1"]  # there may be none for llama
    words = [*args, "--model.scale", "llama", *any_rate]
    return plan_steps(*parse_run(words, check_corpus=False))
