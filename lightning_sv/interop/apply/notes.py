"""Notes on what deviates from a strategy in a model, each with its reason.

A strategy is made for Llama. In other models some matrices cannot have vectors, and the user must
know which. A note is a pair: the name of a parameter, output or model, and the deviation.
"""

from collections.abc import Iterable, Iterator

from lightning_sv.interop.apply.traced_norm import TracedNorm
from lightning_sv.roles.api import TracedModel
from lightning_sv.scale import ScaleStrategy

Note = tuple[str, str]


def notes_on_matrices(norm: TracedNorm, strategy: ScaleStrategy) -> Iterator[Note]:
    """Yield which matrices behind a norm lack vectors of their own."""
    row = strategy.placement_row
    adds_before = row.scale_in and not norm.vector
    if adds_before or row.scale_out:
        yield from _on_missing_vectors(norm)
    if strategy.per_branch:
        yield from _on_mixed_branches(norm)
    elif adds_before:
        for branch in norm.branches:
            why = "because its norm has none that matrices could share; hg gives each its own"
            yield branch.weight, f"no vector before it, {why}"


def _on_missing_vectors(norm: TracedNorm) -> Iterator[Note]:
    lacks = "no vector after it" if norm.vector else "no own vector"
    for name in norm.tied:
        yield name, f"{lacks}, because it is tied; to have one, untie it first"
    if norm.role == "output":
        return
    for name in norm.unfit:
        why = "because it reads other values or a learned multiple, or is not a plain matrix"
        yield name, f"{lacks}, {why}"


def _on_mixed_branches(norm: TracedNorm) -> Iterator[Note]:
    for branch in norm.branches:
        if branch.mixed:
            what = "its matrices, which are interleaved or slices of it, share their vectors"
            yield branch.weight, f"{what}: hg is partial"


def notes_on_model(
    traced: TracedModel, strategy: ScaleStrategy, norms: list[TracedNorm]
) -> Iterator[Note]:
    """Yield notes on layers without norms, and on parameters that the pass did not reach."""
    adds_vectors = strategy.per_branch or strategy.placement_row.scale_out
    if adds_vectors and _lacks_norms(traced, norms):
        why = "none of the others follows a norm whose output only matrices read"
        yield type(traced.model).__name__, f"no matrix except the head gets a vector, because {why}"

    reached = traced.use_roles.keys() | traced.scaled.keys()
    for row in traced.roles.parameters:
        if row.name in reached or row.role != "other":
            continue
        is_matrix = len(row.shape) > 1  # one that does not train may be frozen for the pass
        if row.trained or is_matrix:
            hint = "to change it, pass an example that reaches it"
            yield row.name, f"unchanged, because the forward pass did not reach it; {hint}"


def notes_on_outputs(changed: Iterable[str]) -> Iterator[Note]:
    """Yield notes on outputs next to logits that changed, by their paths."""
    for path in changed:
        yield path, "changes, because it contains a value of a norm whose scale vector has moved"


def _lacks_norms(traced: TracedModel, norms: list[TracedNorm]) -> bool:
    """Return True if no layer's matrix is behind a norm, as in OLMo 2."""
    behind_norms: set[str] = set()
    for norm in norms:
        behind_norms.update(norm.readers)
    of_layers = set()
    for row in traced.roles.parameters:
        if row.role == "matrix":
            of_layers.add(row.name)
    return bool(of_layers) and of_layers.isdisjoint(behind_norms)
