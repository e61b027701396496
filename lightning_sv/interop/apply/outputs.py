"""Outputs of a model before and after a strategy, which must be equal but for rounding.

The trace cannot show everything: a model may read a weight by a reference that it stored before the
strategy, and would then lose gamma in silence. So the model runs on its example three times:

    before                       y
    with vectors, without norms  y, but for rounding; every computed weight was read
    with the norms of `dnp`      the difference is reported
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from lightning_sv.errors import ConfigError
from lightning_sv.interop.apply.weights import OutputNorm, Scaled, scaled_modules
from lightning_sv.roles.api import TracedModel
from lightning_sv.roles.forward import copied, logits_of, tracing_state
from lightning_sv.roles.graph import DATA, PARAM
from lightning_sv.scale import ScaleStrategy

#: largest relative difference of outputs attributed to rounding; of shorter dtypes 0.1
_ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4}
_ROUNDING_SHORT = 0.1


class Outputs(NamedTuple):
    """Floating-point outputs of a model.

    Attributes:
        kept: those that a strategy keeps: the logits, or all outputs if none are called logits
        others: the outputs next to logits, such as hidden states, by their path
    """

    kept: list[Tensor]
    others: dict[str, Tensor]


def outputs_of(traced: TracedModel) -> Outputs:
    """Return the model's outputs in eval mode.

    Raises:
        ConfigError: it returns no finite numbers
    """
    model = traced.model
    args, kwargs = copied(traced.inputs)
    with tracing_state(model), torch.no_grad():
        out = model(*args, **kwargs)
    kept = list(filter(_is_of_numbers, tree_leaves(logits_of(out))))
    if not any(leaf.isfinite().any() for leaf in kept):
        found = f"{type(model).__name__} returns {type(out).__name__}"
        wanted = "finite floating-point numbers, to check that its function is preserved"
        kinds = "a tensor, or a tuple, dict or dataclass of them"
        hint = f"Load the weights first, and let forward return {kinds}."
        raise ConfigError(f"{found}; expected {wanted}. {hint}")
    return Outputs(kept, _others(out, kept))


def _others(out: Any, kept: list[Tensor]) -> dict[str, Tensor]:
    """Return path -> tensor of the outputs that are not kept."""
    leaves, _ = tree_flatten_with_path(logits_of([out]))  # all: a list has no logits
    ids = set(map(id, kept))
    others = {}
    for path, leaf in leaves:
        if _is_of_numbers(leaf) and id(leaf) not in ids:
            others[f"output{keystr(path[1:])}"] = leaf
    return others


def _is_of_numbers(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def outputs_of_vectors(traced: TracedModel, strategy: ScaleStrategy) -> Outputs:
    """Return the outputs without the norms of `dnp`.

    Raises:
        ConfigError: the pass reads a weight by a reference that has no vectors
    """
    model = traced.model
    called: set[str] = set()

    def note_call(module: Any, args: Any, out: Tensor) -> Any:
        called.add(module.plain_name)
        if isinstance(module, OutputNorm):
            return args[0]  # its input
        return out

    added = scaled_modules(model)
    with ExitStack() as hooks:
        for module in added.values():
            hooks.enter_context(module.register_forward_hook(note_call))
        outputs = outputs_of(traced)
    for name, module in added.items():
        if name not in called:
            _check_unread(module, traced, strategy)
    return outputs


def _check_unread(module: Scaled, traced: TracedModel, strategy: ScaleStrategy) -> None:
    """Refuse a weight that the trace has reached, and whose vectors the pass does not read."""
    name = module.plain_name
    if isinstance(module, OutputNorm) and f"{name}.weight" in traced.products:
        what = f"{strategy.placement} normalizes the output of {name}"
        hint = f"Use dp, or dp_at=({name.rpartition('.')[2]!r},)."
        raise ConfigError(f"{what}, but this model uses its weight without calling it. {hint}")
    if name in traced.products or name in traced.scaled:
        what = f"{name} is read by a stored reference, without its scale vectors"
        wanted = "layers that read a weight as an attribute in forward, such as self.weight."
        raise ConfigError(f"{what}; expected {wanted}")


def changed_outputs(before: Outputs, after: Outputs, rounding: float) -> Iterator[str]:
    """Yield the paths of the outputs next to logits that differ by more than rounding."""
    for path, output in before.others.items():
        other = after.others.get(path)
        if other is None or other.shape != output.shape:
            continue  # a model that counts its passes, e.g. of a cache
        if _difference(output, other) > rounding:
            yield path


def rounding_of(traced: TracedModel) -> float:
    """Return the largest difference attributed to rounding, by the narrowest dtype of the pass."""
    largest = 0.0
    for node in traced.flow.graph.nodes:
        depends_on_parameters = node.kind in (PARAM, DATA)
        if depends_on_parameters and node.dtype.is_floating_point:
            largest = max(largest, _ROUNDING.get(node.dtype, _ROUNDING_SHORT))
    return largest


def relative_difference(before: list[Tensor], after: list[Tensor]) -> float:
    """Return max |after - before| / max |before|, the largest of all outputs.

    Masked values, such as logits of -inf or the lowest number, must be equal, or the difference is
    infinite.
    """
    largest = 0.0
    for old, new in zip(before, after, strict=True):
        largest = max(largest, _difference(old, new))
    return largest


@torch.no_grad()  # a model may return a parameter
def _difference(before: Tensor, after: Tensor) -> float:
    lowest = torch.finfo(before.dtype).max / 2
    is_number = before.isfinite() & (before.abs() < lowest)
    masked = before[~is_number]
    if not torch.allclose(masked, after[~is_number], rtol=0, atol=0, equal_nan=True):
        return math.inf
    if not is_number.any():
        return 0.0

    old = before[is_number].double()
    new = after[is_number].double()
    if not new.isfinite().all():
        return math.inf
    return float((new - old).abs().max() / old.abs().max().clamp_min(1e-30))
