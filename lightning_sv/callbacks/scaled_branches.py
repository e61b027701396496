"""Branches of a model and their scale vectors, for `BranchGroup`s and after `apply_strategy`."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lightning_sv.callbacks.run_state import model_of
from lightning_sv.errors import ConfigError
from lightning_sv.optim import full_tensor
from lightning_sv.scale import output_norms, scaled_linears


class ScaledBranch(NamedTuple):
    """A matrix with its scale vectors, or a norm without branches.

    Attributes:
        name: name, for instance 'layer0/q_proj'
        weight: the matrix, (*batch_dims, d_out, d_in); None for a norm
        vectors: side ('in', 'out') -> its `ScaleVector`, or a function that returns gamma
    """

    name: str
    weight: Tensor | None
    vectors: dict[str, Callable[[], Tensor]]

    def gammas(self) -> dict[str, Tensor]:
        """Return side -> gamma; a collective for sharded vectors."""
        return {side: full_tensor(vector()) for side, vector in self.vectors.items()}


def scaled_branches(model: nn.Module) -> list[ScaledBranch]:
    """Return every branch and output norm of `model`, in module order."""
    return [
        ScaledBranch(name, weight, {side: vector for side, vector in vectors.items() if vector is not None})
        for name, weight, vectors in (*_of_linears(model), *_of_norms(model), *_of_applied(model))
    ]


def _of_linears(model: nn.Module) -> Iterator[tuple[str, Tensor | None, dict[str, Any]]]:
    for path, branch, (scale_in, scale_out) in scaled_linears(model):
        name = f"{place_of(path)}/{path.rpartition('.')[2]}"
        yield name, branch.weight, {"in": scale_in, "out": scale_out}


def _of_norms(model: nn.Module) -> Iterator[tuple[str, Tensor | None, dict[str, Any]]]:
    for path, norm in output_norms(model):
        yield f"{place_of(path)}/{path.rpartition('.')[2]}", None, {"out": norm.scale}


def _of_applied(model: nn.Module) -> Iterator[tuple[str, Tensor | None, dict[str, Any]]]:
    for path, module in model.named_modules():
        if not parametrize.is_parametrized(module, "weight"):
            continue
        name, stored = f"{place_of(path)}/{path.rpartition('.')[2]}", module.parametrizations.weight  # type: ignore[union-attr]
        for parametrization in stored:
            if hasattr(parametrization, "parts"):
                matrix = stored.original.mT if parametrization.transposed else stored.original
                norm = getattr(module, "output_norm", None)
                for i, (part, weight) in enumerate(
                    zip(parametrization.parts, matrix.split(parametrization.widths, -2), strict=True)
                ):
                    out = part.scale_out if norm is None else norm.scale
                    yield (
                        name + (f"{i}" if len(parametrization.parts) > 1 else ""),
                        weight,
                        {"in": part.scale_in, "out": out},
                    )
            elif hasattr(parametrization, "vector"):
                yield name, None, {"out": parametrization.vector}


def place_of(path: str) -> str:
    """Return 'layer3' for a module inside block 3, 'head' outside the blocks."""
    number = next((part for part in path.split(".") if part.isdigit()), None)
    return "head" if number is None else f"layer{number}"


def means_over_layers(figures: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Average 'layer0/q_proj/W', 'layer1/q_proj/W', ... as 'mean/q_proj/W'; longer keys are omitted."""
    over_layers: dict[str, list[Tensor]] = defaultdict(list)
    for key, value in figures.items():
        if key.startswith("layer") and key.count("/") == 2:
            over_layers[key.partition("/")[2]].append(value)
    return {f"mean/{key}": torch.stack(values).mean() for key, values in over_layers.items()}


def check_scaled(module: L.LightningModule, name: str | None, callback: str) -> nn.Module:
    """Return the model of a callback (see `run_state.model_of`) and check that it has scale vectors.

    Raises:
        ConfigError: the model has no scale vectors
    """
    model = model_of(module, name)
    if not any(branch.vectors or branch.weight is not None for branch in scaled_branches(model)):
        raise ConfigError(
            f"the model of {callback} is {type(model).__name__}, without scale vectors; expected a Backbone, a model "
            "built with ScaleBuilder, or a model after apply_strategy."
        )
    return model
