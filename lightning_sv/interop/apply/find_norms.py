"""Norms of a traced model, with their scale vectors and the matrices that read them.

A vector may move from its norm into the matrices behind it if they read nothing else of it:

    gamma * xhat -> q_proj, k_proj, v_proj      moves: W diag(gamma), in each of them
    gamma * xhat + b -> q_proj                  moves, and b becomes b / gamma
    gamma * xhat -> q_proj, conv                stays in its norm, for a reason

A vector or a matrix that the pass did not reach, such as an expert without tokens, is refused if
others like it have a place at a norm.
"""

from collections.abc import Iterable, Iterator

from lightning_sv.errors import ConfigError
from lightning_sv.interop.apply.bare_norms import bare_norms
from lightning_sv.interop.apply.biases import added_after
from lightning_sv.interop.apply.matrices import Matrices, TracedBranch
from lightning_sv.interop.apply.traced_norm import TracedNorm, branches_of
from lightning_sv.roles import family
from lightning_sv.roles.api import TracedModel
from lightning_sv.roles.dataflow import value_at
from lightning_sv.roles.graph import Node
from lightning_sv.roles.types import ModelParameter, agreed

_VECTORS = ("input", "output")
_MATRICES = ("matrix", "router", "head")


def norms_with_vectors(matrices: Matrices) -> list[TracedNorm]:
    """Return the norms that have a scale vector which the pass reached, in the model's order."""
    traced = matrices.traced
    norms = []
    for row in traced.roles.parameters:
        if row.role in _VECTORS and row.name in traced.scaled:
            norms.append(_traced_norm(row, matrices))
    return norms


def find_norms(traced: TracedModel) -> list[TracedNorm]:
    """Return the norms that have a scale vector, and those without one that only matrices read.

    Raises:
        ConfigError: there is no norm, several modules have a vector, or the pass did not reach a
            vector, or a matrix like those behind norms
    """
    matrices = Matrices(traced)
    norms = [*norms_with_vectors(matrices), *bare_norms(matrices)]
    if not norms:
        name = type(traced.model).__name__
        raise ConfigError(f"{name} has no norm; expected a model with norms for a strategy.")
    _check_untied(norms, matrices)
    _check_reached(norms, traced)
    return norms


def _traced_norm(row: ModelParameter, matrices: Matrices) -> TracedNorm:
    """Return the norm of a scale vector, with the matrices that read its values."""
    traced = matrices.traced
    branches: list[TracedBranch] = []
    unfit: list[str] = []
    for name in matrices.names_read(traced.consumers_of(row.name)):
        if row.role == "input" and matrices.is_plain(name):
            branches.append(matrices.branch(name))
        else:
            unfit.append(name)

    names = [branch.weight for branch in branches]
    return TracedNorm(
        vector=row.name,
        origin=_origin(row, traced),
        role=row.role,
        bias=added_after(row.name, traced).bias,
        branches=tuple(branch for branch in branches if branch.weight not in matrices.tied),
        tied=tuple(sorted(matrices.tied.intersection(names))),
        stays=_reason_to_stay(row, names, unfit, matrices),
        unfit=tuple(unfit),
    )


def _reason_to_stay(
    row: ModelParameter, weights: list[str], unfit: list[str], matrices: Matrices
) -> str | None:
    """Return why a vector cannot move into the matrices that read it; None if it can."""
    for weight in weights:
        misfit = _misfit(row, weight, matrices)
        if misfit is not None:
            return misfit
    if row.role == "input":
        if unfit:
            products = "a function of a matrix or a different kind of product"
            return f"it is read by a convolution, {products}"
        if added_after(row.name, matrices.traced).others:
            return "something other than one bias of its shape is added after it"
    if not row.redundant:
        return "the operations that read it cannot absorb it"
    return None


def _misfit(row: ModelParameter, weight: str, matrices: Matrices) -> str | None:
    """Return why one matrix cannot absorb a vector; None if it can."""
    shape = row.shape
    if weight in matrices.tied:
        return f"{weight} is tied and read elsewhere"
    if len(shape) != 1:
        return f"its shape has {len(shape)} axes"
    if matrices.width_read(weight) != shape[0]:
        return f"{weight} reads it with a different width"
    return None


def _origin(row: ModelParameter, traced: TracedModel) -> float | None:
    """Return the constant added to a parameter for gamma.

    None if gamma is a different function, or a part, of the parameter.
    """
    if "bias" in traced.use_roles[row.name]:  # a table of gammas and biases
        return None
    return agreed({_constant_added(scaled.factor) for scaled in traced.scaled[row.name]})


def _constant_added(factor: Node) -> float | None:
    """Return c of a factor w + c of a parameter w; None for another function of it."""
    gammas = [value_at(factor, parameter) for parameter in (0.0, 1.0, 3.0)]
    c = gammas[0]
    if c is None or gammas != [c, c + 1, c + 3]:
        return None
    return c


def _check_untied(norms: Iterable[TracedNorm], matrices: Matrices) -> None:
    """Refuse a vector that several modules have, of which one alone would get the strategy's."""
    for norm in norms:
        if norm.vector in matrices.tied:
            hint = "give each module a parameter of its own, with the same values."
            raise ConfigError(f"{norm.vector} is tied to another parameter; {hint}")


def _check_reached(norms: Iterable[TracedNorm], traced: TracedModel) -> None:
    """Refuse what has a role by its siblings alone, and would have a scale vector of its own."""
    unreached = [*unreached_vectors(traced), *_unreached_branches(norms, traced)]
    if unreached:
        what = f"no token of the example reached {unreached[0]}, so its scale vector is unknown"
        example = "pass an example that reaches it, such as one with more tokens"
        hint = f"{example}, or a forward pass that runs it."
        raise ConfigError(f"{what}; {hint}")


def unreached_vectors(traced: TracedModel) -> Iterator[str]:
    """Yield the scale vectors that the pass did not reach, whose role is that of others."""
    for row in traced.roles.parameters:
        if row.role in _VECTORS and row.name not in traced.scaled:
            yield row.name


def _unreached_branches(norms: Iterable[TracedNorm], traced: TracedModel) -> Iterator[str]:
    """Yield the matrices that the pass did not reach, if others of their family follow a norm."""
    families = {family(branch.weight) for branch in branches_of(norms)}
    for row in traced.roles.parameters:
        if row.role not in _MATRICES or family(row.name) not in families:
            continue
        uses = traced.use_roles.get(row.name)
        if not uses:
            yield row.name
