"""Configurations of runs: files, keys and a strategy, parsed once into arguments of `fit`."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from lightning_sv.atomic import file_sha256
from lightning_sv.errors import expect
from lightning_sv.experiments.spec import ArmSpec
from lightning_sv.lit.run_arguments import parse_run
from lightning_sv.runs.directory import LAST
from lightning_sv.scale import ScaleOptions, expand_preset
from lightning_sv.settings.data import DataConfig
from lightning_sv.settings.model import PretrainConfig
from lightning_sv.settings.overrides import is_dictionary, keys_of_file, to_args
from lightning_sv.settings.sections import keys_in_sections
from lightning_sv.settings.yaml_file import read_yaml

_ABSENT = object()
# keys of which each run has its own value, or that are about the output of one run
_RESERVED = ("model.scale", "seed_everything", "run_dir", "ckpt_path", "json")
# values that `RunSpec.details` states in other words
_HIDDEN = ("model.optim.lr", "model.backbone.name", "model.scale_options")
_SHOWN = ("model.", "trainer.gradient_clip_val")


@dataclass(frozen=True)
class RunSpec:
    """Configuration of the runs of an arm without their seed.

    Arms of equal configuration are trained once.

    Attributes:
        details: optimizer, schedule and the values that differ from the files, as text
        args: arguments of `fit`, without seed and directory
        identity: `settings` as JSON with sorted keys, which the name of a run's directory hashes
        parameters: activated parameters
        cost: GPU-hours under a budget with `gpu`; otherwise seconds; 0 without a budget
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

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Configuration from YAML and arguments, without defaults of the code."""
        return cast(dict[str, Any], json.loads(self.identity))

    @property
    def tokens_per_param(self) -> float:
        """Training tokens per activated parameter; 100 in the paper."""
        return self.tokens / self.parameters

    def run_name(self, seed: int) -> str:
        """Return the name of the run directory: readable, with a hash of configuration and seed."""
        digest = hashlib.sha256(f"{self.identity} {seed}".encode()).hexdigest()[:10]
        return re.sub(r"[^\w.+-]+", "_", f"{self.model}-{self.strategy}-seed{seed}-{digest}")


@dataclass(frozen=True)
class RunConfig:
    """Configuration of a run before it is parsed: YAML files, keys above theirs, a strategy."""

    files: Sequence[Path]
    keys: Mapping[str, Any]
    scale: str

    @cached_property
    def file_settings(self) -> DictConfig:
        """Settings of the files; a later file replaces the values of an earlier one.

        Raises:
            ConfigError: two files set different entries of one dictionary, of which `fit` takes
                those of the later file alone
        """
        dictionaries: dict[str, Any] = {}
        for path in self.files:
            for key, value in keys_of_file(path).items():
                if not is_dictionary(value):
                    continue
                earlier = dictionaries.setdefault(key, value)
                expected = f"{earlier}, as in an earlier file. Set it in one file."
                expect(value == earlier, f"{key} in {path}", value, expected)
        contents = [read_yaml(path, f"--config {path}") for path in self.files]
        return cast(DictConfig, OmegaConf.merge({}, *contents))

    @cached_property
    def changes(self) -> dict[str, Any]:
        """Keys whose values are not those of the files, so that one configuration has one command.

        Raises:
            ConfigError: a key is a section of another one, so that it is unknown which one counts
        """
        for key, following in pairwise(sorted(self.keys)):
            is_section = following.startswith(f"{key}.")
            expected = f"no value, because --{following} is set. Set its entries instead."
            expect(not is_section, f"--{key}", self.keys[key], expected)

        changes = {}
        for key, value in sorted(keys_in_sections(self.keys).items()):
            if OmegaConf.select(self.file_settings, key, default=_ABSENT) != value:
                changes[key] = value
        return changes

    def parse(self) -> "ParsedRun":
        """Parse the run as `fit` does, without its corpus.

        Raises:
            ConfigError: keys that `fit` refuses, or that each run has of its own
        """
        for key in _RESERVED:
            expected = "no value, because each arm or run has its own. Remove it."
            expect(key not in self.keys, f"--{key}", self.keys.get(key), expected)
        args = [*fit_args(self.files, self.changes), "--model.scale", self.scale]
        return ParsedRun(self, *parse_run(args, check_corpus=False))


@dataclass(frozen=True)
class ParsedRun:
    """Configuration of a run, with its settings."""

    config: RunConfig
    model: PretrainConfig
    data: DataConfig
    trainer: dict[str, Any]

    @property
    def strategy(self) -> str:
        """Strategy; without exceptions also without words that have no effect on the model."""
        if any(key.startswith("model.scale_options") for key in self.config.changes):
            return str(self.model.strategy)
        return str(self.model.plan.canonical)

    @property
    def label(self) -> str:
        """Strategy and exceptions."""
        return f"{self.strategy}{self.model.scale_options.label()}"

    def spec(self, steps: int, cost: float = 0.0, note: str = "", probes: str = "") -> RunSpec:
        """Return the configuration of runs of this many steps.

        Args:
            steps: optimizer steps
            cost: see `RunSpec`
            note: sentence for readers of the losses
            probes: file of conf/probes, for the details; "" for none

        Raises:
            ConfigError: a seed is set, so that runs of different seeds are not independent
        """
        model = self.model
        data = self.data
        for key, seed in (("model.seed", model.seed), ("data.seed", data.seed)):
            expected = "null, because runs of different seeds would share weights or batches."
            expect(seed is None, key, seed, expected)

        settled = {
            "model.optim.lr": model.plan.lr,
            "model.scale": self.strategy,
            "trainer.max_steps": steps,
        }
        keys = {**self.config.changes, **settled}
        details = ", ".join(self._details(probes))
        tokens = steps * data.tokens_per_step
        name = model.backbone.name
        return RunSpec(
            model=name,
            strategy=self.label,
            details=details,
            args=tuple(fit_args(self.config.files, keys)),
            identity=self._identity(keys),
            steps=steps,
            tokens=tokens,
            parameters=model.plan.n_activated,
            cost=cost,
            title=f"{name}, {self.label}, {details}, {steps:,} steps",
            note=note,
            epochs=data.epochs(tokens) if data.is_prepared else None,
        )

    def _details(self, probes: str) -> Iterator[str]:
        yield f"{self.model.optim.name} {self.model.schedule.name}"
        yield f"lr {self.model.plan.lr:g}"
        for key, value in self.config.changes.items():
            is_stated = key.startswith(_HIDDEN)
            if key.startswith(_SHOWN) and not is_stated:
                yield f"{key.rpartition('.')[2]} {value}"
        if probes:
            yield f"probes {probes}"

    def _identity(self, keys: Mapping[str, Any]) -> str:
        settings = OmegaConf.merge({}, self.config.file_settings)
        for key, value in keys.items():
            OmegaConf.update(settings, key, value, merge=False, force_add=True)
        identity = cast(dict[str, Any], OmegaConf.to_container(settings))

        identity.pop("seed_everything", None)
        # Runs without it keep the names under which they were recorded before this key existed.
        identity["data"].pop("full_last_validation", None)
        if self.data.full_last_validation:  # also by default
            identity["data"]["full_last_validation"] = True
        if self.model.init_from is not None:
            identity["model"]["init_from"] = _checkpoint_hash(self.model.init_from)
        return json.dumps(identity, sort_keys=True)


def fit_args(files: Sequence[Path], keys: Mapping[str, Any]) -> list[str]:
    """Return files and keys as arguments of `fit`."""
    args = []
    for path in files:
        args += ["--config", path.as_posix()]
    return [*args, *to_args(keys)]


def without_preset(arm: ArmSpec) -> ArmSpec:
    """Return the arm with words and keys instead of a preset, so that equal arms are one run."""
    scale, options = expand_preset(arm.scale, ScaleOptions())
    placements = {
        f"model.scale_options.placement_at.{site}": placement
        for site, placement in options.placement_at.items()
    }
    return replace(arm, scale=str(scale), overrides={**placements, **arm.overrides})


@cache
def _checkpoint_hash(init_from: str) -> str:
    """Return the hash of the checkpoint that a run starts from; the file at its path may change."""
    path = Path(init_from)
    if path.is_dir():
        path /= LAST
    expected = f"a checkpoint at {path}. Set it to RUN/{LAST}."
    expect(path.is_file(), "model.init_from", init_from, expected)
    return file_sha256(path)
