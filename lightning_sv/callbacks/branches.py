"""Branches of a model with scale vectors, and the base of callbacks that write figures of them."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_sv.callbacks.run_state import model_of
from lightning_sv.callbacks.step_callback import StepCallback
from lightning_sv.errors import ConfigError
from lightning_sv.optim import full_tensor
from lightning_sv.scale import output_norms, scaled_linears
from lightning_sv.scale.definitions import upcast


@dataclass(frozen=True)
class ScaledBranch:
    """A matrix with its scale vectors, or a norm without branches.

    Attributes:
        name: 'layer0/q_proj'
        weight: (*batch_dims, d_out, d_in); None for a norm
        vectors: side ('in', 'out') -> its `ScaleVector`, or a function that returns gamma
        path: name if several branches have the same `name`
        has_output_norm: if True, a norm stands between W and gamma_out (`dnp`)
    """

    name: str
    weight: Tensor | None
    vectors: dict[str, Callable[[], Tensor]]
    path: str
    has_output_norm: bool = False

    def gammas(self) -> dict[str, Tensor]:
        """Return side -> gamma, at least in float32; a collective for sharded vectors."""
        return {side: upcast(full_tensor(vector())) for side, vector in self.vectors.items()}

    def full_weight(self) -> Tensor:
        """Return the weight, at least in float32; a collective if it is sharded."""
        assert self.weight is not None
        return upcast(full_tensor(self.weight))


def scaled_branches(model: nn.Module) -> list[ScaledBranch]:
    """Return every branch of `model`, then every output norm, then those of `apply_strategy`."""
    branches = [*_built_branches(model), *_applied_branches(model)]
    names = unique_names({branch.path: branch.name for branch in branches})
    return [replace(branch, name=names[branch.path]) for branch in branches]


def _built_branches(model: nn.Module) -> Iterator[ScaledBranch]:
    """Yield the branches and output norms of modules that were built with a strategy."""
    for path, linear, (scale_in, scale_out) in scaled_linears(model):
        has_norm = linear.norm_width is not None
        vectors = {"in": scale_in, "out": scale_out}
        yield _branch(path, linear.weight, vectors, has_output_norm=has_norm)
    for path, norm in output_norms(model):
        yield _branch(path, None, {"out": norm.scale})


def _applied_branches(model: nn.Module) -> Iterator[ScaledBranch]:
    """Yield the branches of modules to which a strategy was applied."""
    for prefix, module, applied in applied_strategies(model):
        for part in applied.branches(module):
            yield _branch(
                part.path,
                part.matrix,
                part.sides,
                suffix=part.suffix,
                prefix=prefix,
                has_output_norm=part.has_output_norm,
            )


def unique_names(name_of: Mapping[str, str]) -> dict[str, str]:
    """Return path -> name, with the path itself if several paths have the same name."""
    counts = Counter(name_of.values())
    unique = dict(name_of)
    for path, name in name_of.items():
        if counts[name] > 1:
            unique[path] = path
    return unique


def applied_strategies(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """Yield path, module and `interop.apply.applied.Applied` of the modules with a strategy."""
    for path, module in model.named_modules():
        applied = vars(module).get("applied_strategy")
        if applied is not None:
            yield path, module, applied


def _branch(
    path: str,
    weight: Tensor | None,
    vectors: Mapping[str, Any],
    *,
    suffix: str = "",
    prefix: str = "",
    has_output_norm: bool = False,
) -> ScaledBranch:
    _, _, name = path.rpartition(".")
    full_path = f"{prefix}.{path}".removeprefix(".")
    return ScaledBranch(
        name=f"{place_of(path)}/{name}{suffix}",
        weight=weight,
        vectors={side: vector for side, vector in vectors.items() if vector is not None},
        path=unique_place(full_path) + suffix,
        has_output_norm=has_output_norm,
    )


def place_of(path: str) -> str:
    """Return 'layer3' for a module inside block 3, 'head' outside the blocks."""
    for part in path.split("."):
        if part.isdigit():
            return f"layer{part}"
    return "head"


def unique_place(path: str) -> str:
    """Return `place_of` with the path: 'layer3/decoder_blocks_mlp' for 'decoder.blocks.3.mlp'."""
    without_number = re.sub(r"\.\d+\b", "", path, count=1)
    return f"{place_of(path)}/{without_number.replace('.', '_')}"


def means_over_layers(figures: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Average 'layer0/q_proj/W', 'layer1/q_proj/W', ... as 'mean/q_proj/W'; skip longer keys."""
    over_layers: dict[str, list[Tensor]] = defaultdict(list)
    for key, value in figures.items():
        place, _, rest = key.partition("/")
        if place.startswith("layer") and rest.count("/") == 1:
            over_layers[rest].append(value)
    return {f"mean/{key}": torch.stack(values).mean() for key, values in over_layers.items()}


class BranchCallback(StepCallback):
    """Callback that writes figures of a model's branches, also before the first step."""

    def __init__(self, every_n_steps: int, model: str | None):
        super().__init__(every_n_steps, model)
        self._model = nn.Module()  # until on_fit_start

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find the model; raise ConfigError if it has no scale vectors."""
        self._model = model_of(pl_module, self.model)
        if not scaled_branches(self._model):
            found = f"{type(self._model).__name__}, without scale vectors"
            expected = "a Backbone, a model built with ScaleBuilder, or one after apply_strategy"
            raise ConfigError(f"the model of {self.name} is {found}; expected {expected}.")
