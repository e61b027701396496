"""Strategies on existing models: decided, executed, and checked on real outputs.

    trace      TracedModel, find_norms   which vectors and norms there are, and who reads them
    decide     Placements                what becomes of each; nothing changes yet
    execute    Change                    each step with its inverse on a stack
    check      outputs                   equal outputs, or the stack runs and the model is as before
    report     notes                     what deviates from the strategy, and why

No step knows the architecture. The check of the outputs finds weights that the trace cannot see,
such as one that is read by a stored reference.

`Applied` stays in the model: `folding` removes the strategy by it, and `checks` refuses what would
undo the strategy in silence.
"""

import warnings
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake

from lightning_sv.errors import ConfigError, expect
from lightning_sv.interop.apply.applied import APPLIED
from lightning_sv.interop.apply.change import Change
from lightning_sv.interop.apply.find_norms import find_norms
from lightning_sv.interop.apply.notes import notes_on_model, notes_on_outputs
from lightning_sv.interop.apply.outputs import (
    changed_outputs,
    outputs_of,
    outputs_of_vectors,
    relative_difference,
    rounding_of,
)
from lightning_sv.interop.apply.placements import Placements
from lightning_sv.interop.apply.report import Report
from lightning_sv.interop.apply.traced_norm import TracedNorm, branches_of
from lightning_sv.interop.apply.weights import Scaled
from lightning_sv.nn import Backbone
from lightning_sv.roles.api import TracedModel
from lightning_sv.roles.example_inputs import check_module, uncompiled
from lightning_sv.scale import ScaledLinear, ScaleOptions, ScaleStrategy, ScaleVector, expand_preset

#: wrappers that distribute a model's parameters, and would miss vectors that are added later
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel")


def apply_strategy(
    model: nn.Module,
    strategy: str | ScaleStrategy,
    example: Any = None,
    *,
    dp_at: Collection[str] = (),
) -> Report:
    """Add the scale vectors of a strategy to an existing model, in place.

    Matrices behind a norm become gamma_out * (W (gamma_in * xhat)) by parametrizations of their
    weights, with the norm's own gamma in gamma_in, so that the function is preserved. Norms without
    matrices keep their gamma, in the strategy's parameterization. Only `dnp` changes the function:
    it normalizes the outputs of nn.Linear layers, and is `dp` for other layers. `param_groups` then
    has the strategy's decay, and `fold_applied` removes the strategy. Vectors of a frozen matrix or
    norm are frozen.

    Args:
        model: a plain model on real tensors, before PEFT, DDP, sharding or compiling
        strategy: the strategy, for instance 'hg+dp+or+iwd'
        example: example inputs of the model, see `weight_decay_roles`
        dp_at: matrices that get `dp` instead of the strategy's `dnp`, by the last part of their
            names: ('lm_head',)

    Returns:
        A report with the largest difference of the outputs.

    Raises:
        ConfigError: the model cannot have this strategy; it is unchanged

    Warns:
        UserWarning: the report has notes, such as deviations from the strategy
    """
    words, options = expand_preset(strategy, ScaleOptions())
    parsed = ScaleStrategy.parse(words)
    dp_at = [dp_at] if isinstance(dp_at, str) else list(dp_at)
    check_module(model)
    model = uncompiled(model)
    _check(model)
    # Vectors made in inference mode could not train. An error before the end of the block, also a
    # warning that is an error, runs `undo`.
    with torch.inference_mode(False), ExitStack() as undo:
        traced = TracedModel(model, example)
        norms = find_norms(traced)
        if options.placement_at:  # of unified-head-dp: dp at lm_head, our name of the head
            dp_at += _head_names(norms)
        before = outputs_of(traced)
        placements = Placements(model, parsed, dp_at, norms)
        change = Change(model, placements, undo)
        change.register(norms)

        # the vectors alone must preserve the function; only the norms of `dnp` may change it
        without_norms = outputs_of_vectors(traced, parsed)
        difference = relative_difference(before.kept, without_norms.kept)
        _check_preserved(traced, parsed, difference)
        if change.has_output_norms:
            difference = relative_difference(before.kept, outputs_of(traced).kept)

        vectors = _names_of_vectors(model)
        changed = changed_outputs(before, without_norms, rounding_of(traced))
        notes = [*placements.notes, *notes_on_model(traced, parsed, norms)]
        notes += notes_on_outputs(changed)
        report = Report(
            strategy=parsed,
            vectors=tuple(vectors),
            notes=tuple(notes),
            difference=difference,
            same_function=not change.has_output_norms,
            stacked=tuple(name for name, axes in vectors.items() if axes > 1),
            dp_at=tuple(dict.fromkeys(dp_at)),
        )
        if report.warning is not None:
            warnings.warn(report.warning, stacklevel=2)
        undo.pop_all()  # all is well: keep the changes
    return report


def _check_preserved(traced: TracedModel, strategy: ScaleStrategy, difference: float) -> None:
    if not difference <= rounding_of(traced):
        name = type(traced.model).__name__
        found = f"{strategy} would change the outputs of {name} by {difference:.1e}"
        why = "because a matrix reads its scale vectors in a way that the trace does not show"
        raise ConfigError(f"{found}, {why}. The model is unchanged.")


def _names_of_vectors(model: nn.Module) -> dict[str, int]:
    """Return path of each scale vector -> the axes of its parameters, sorted by path."""
    axes = {}
    for path, module in model.named_modules():
        if isinstance(module, ScaleVector):
            shapes = [parameter.shape for parameter in module.parameters()]
            axes[path] = max(map(len, shapes), default=1)
    return dict(sorted(axes.items()))


def _head_names(norms: Sequence[TracedNorm]) -> list[str]:
    """Return the last part of the name of the output projection, if it reads a norm."""
    heads = set()
    for branch in branches_of(norms):
        if branch.role == "head":
            heads.add(branch.word)
    return sorted(heads)


def _check(model: nn.Module) -> None:
    """Check that the weights of a model are those in its modules' code."""
    name = type(model).__name__
    modules = list(model.modules())
    for module in modules:  # first: a built vector is inside of an applied one
        if isinstance(module, Scaled) or APPLIED in vars(module):
            hint = "call fold_applied(model) first. A LightningModule applies it in __init__."
            raise ConfigError(f"this {name} already has a strategy; {hint}")
    for module in modules:
        _check_kind(module, name)
    for key, parameter in model.named_parameters():
        wanted = "one with weights. Load or initialize them first."
        has_values = not parameter.is_meta and not is_fake(parameter)
        expect(has_values, "model", f"without values ({key})", wanted)
    if getattr(model, "is_quantized", False):
        raise ConfigError(f"this {name} is quantized; apply the strategy before quantization.")


def _check_kind(module: nn.Module, name: str) -> None:
    """Refuse a module that was built with a strategy, wraps the model, or is PEFT's."""
    kind = type(module)
    if isinstance(module, Backbone | ScaledLinear | ScaleVector):
        found = f"a {name} that was built with a strategy"
        wanted = "a model without scale vectors of this package. Build this one with its strategy."
        raise ConfigError(f"model is {found}; expected {wanted}")
    if kind.__name__ in _WRAPPERS:
        wanted = "the model inside. Apply the strategy, then wrap it."
        raise ConfigError(f"model is wrapped in {kind.__name__}; expected {wanted}")
    if kind.__module__.split(".")[0] == "peft":
        raise ConfigError(f"this {name} has PEFT layers; apply the strategy before PEFT.")
