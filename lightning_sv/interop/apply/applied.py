"""State of a model with an applied strategy.

The strategy leaves its traces in the model, because copies and stages of it must have them too:

    model.applied_strategy        an `Applied`: what folding restores, and callbacks read
    module.frozen_by_strategy     names of its parameters that the strategy froze

Both refer to parameters by their names, so that a deep copy refers to its own.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_sv.interop.apply.matrices import TracedBranch
from lightning_sv.interop.apply.weights import (
    OutputNorm,
    Scaled,
    ScaledPart,
    ScaledWeight,
    name_of_original,
    scaled_modules,
)
from lightning_sv.interop.groups import unwrapped
from lightning_sv.scale import ScaleStrategy
from lightning_sv.scale.vector import Role

#: attribute of an applied model with its `Applied`
APPLIED = "applied_strategy"
#: attribute of a module with the names of its parameters that train again after folding; copies
#: have it too
FROZEN = "frozen_by_strategy"
REMOVE = "remove that first with torch.nn.utils.parametrize.remove_parametrizations"

_PLAIN = ScaledPart(None, None)


class AppliedBranch(NamedTuple):
    """A matrix behind a norm, or a norm without matrices.

    Attributes:
        path: path of the layer
        suffix: number of the matrix, if the layer has several
        matrix: (*batch_dims, d_out, d_in)
        sides: 'in' and 'out' -> a ScaleVector, or a function that returns gamma
        has_output_norm: if True, a norm stands between the matrix and the vector of 'out' (`dnp`)
    """

    path: str
    suffix: str
    matrix: Tensor | None
    sides: dict[str, Any]
    has_output_norm: bool = False


class Applied(NamedTuple):
    """State of an applied strategy, which folding restores and callbacks read."""

    strategy: ScaleStrategy
    constants: dict[str, float | None]  #: parameter that must not train -> its value, if known
    weights: frozenset[str]  #: names of the weights that are computed
    handles: list[Any]  #: handles of the model's hooks
    norms: dict[str, tuple[Role, float]]  #: vector that remains in its norm -> role and origin
    #: matrices behind norms, and the name in `norms` of the vector they read
    matrices: list[tuple[TracedBranch, str]]

    def stored(self, model: nn.Module) -> Iterator[tuple[Role, nn.Parameter]]:
        """Yield role and parameter of the vectors that their norms store as gamma - origin."""
        parameters = _parameters(model)
        for name, (role, _) in self.norms.items():
            if name in parameters:
                yield role, parameters[name]

    def branches(self, model: nn.Module) -> Iterator[AppliedBranch]:
        """Yield the matrices behind norms, then norms without matrices."""
        parameters = _parameters(model)
        scaled = scaled_modules(model)
        gammas = self._gammas(parameters, scaled)
        without_matrices = dict(gammas)
        for matrix, norm in self.matrices:
            without_matrices.pop(norm, None)
            weight = _weight_of(matrix, parameters)
            if weight is not None:  # otherwise a new module replaced it
                yield from _branches_of(matrix, weight, gammas.get(norm), scaled)

        for name, gamma in without_matrices.items():
            role, _ = self.norms[name]
            side = {"input": "in", "output": "out"}[role]
            yield AppliedBranch(name.rpartition(".")[0], "", None, {side: gamma})

    def _gammas(
        self, parameters: dict[str, nn.Parameter], scaled: dict[str, Scaled]
    ) -> dict[str, Any]:
        """Return the vectors that remain in norms, or functions that return their gamma."""
        gammas: dict[str, Any] = {}
        for name, (_, origin) in self.norms.items():
            if name in scaled:
                gammas[name] = scaled[name].vector
            elif name in parameters:
                gammas[name] = partial(torch.add, parameters[name], origin)
        return gammas


def _weight_of(matrix: TracedBranch, parameters: dict[str, nn.Parameter]) -> nn.Parameter | None:
    """Return the parameter of a matrix, also if its weight is computed."""
    original = name_of_original(matrix.weight)
    return parameters.get(original, parameters.get(matrix.weight))


def _branches_of(
    matrix: TracedBranch, weight: nn.Parameter, norm_gamma: Any, scaled: dict[str, Scaled]
) -> Iterator[AppliedBranch]:
    """Yield the matrices in a weight, each with its own vectors or those of the norms around it."""
    blocks = matrix.rows(weight).split(matrix.parts, -2)  # (*batch_dims, width, d_in) each
    output_norm = scaled.get(matrix.weight.rpartition(".")[0])
    has_output_norm = isinstance(output_norm, OutputNorm)
    scale_after = getattr(output_norm, "scale", None)
    path = matrix.weight.removesuffix(".weight")
    for i, (block, part) in enumerate(zip(blocks, _scaled_parts(matrix, scaled), strict=True)):
        suffix = ""
        if len(blocks) > 1:
            suffix = str(i)
        sides = {"in": part.scale_in or norm_gamma, "out": part.scale_out or scale_after}
        yield AppliedBranch(path, suffix, block, sides, has_output_norm)


def _scaled_parts(matrix: TracedBranch, scaled: dict[str, Scaled]) -> Iterable[Any]:
    """Return the scale vectors of each matrix in a weight."""
    weight = scaled.get(matrix.weight)
    if isinstance(weight, ScaledWeight):
        return weight.parts
    return [_PLAIN] * len(matrix.parts)


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by their names, also by those without wrappers and LoRA's layers."""
    named = dict(model.named_parameters(remove_duplicate=False))
    short = {}
    for name, parameter in named.items():
        short[unwrapped(name.replace(".base_layer", ""))] = parameter
    return short | named
