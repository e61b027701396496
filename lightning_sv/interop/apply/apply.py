"""Strategies on existing models: planned, executed, and checked on real outputs."""

import math
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.utils._pytree import tree_leaves

from lightning_sv.errors import ConfigError, expect
from lightning_sv.interop.apply.applied import APPLIED
from lightning_sv.interop.apply.change import Change
from lightning_sv.interop.apply.sites import Site, find_sites
from lightning_sv.interop.apply.weights import OutputNorm, Scaled
from lightning_sv.nn import Backbone
from lightning_sv.roles.api import TracedModel
from lightning_sv.roles.example_inputs import check_module, uncompiled
from lightning_sv.roles.forward import copied, logits_of, tracing_state
from lightning_sv.roles.graph import DATA, PARAM
from lightning_sv.roles.types import ModelRole
from lightning_sv.scale import ScaledLinear, ScaleOptions, ScaleStrategy, ScaleVector, expand_preset

#: largest relative difference of outputs attributed to rounding
_ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4}
_ROUNDING_SHORT = 0.1
#: wrappers that distribute a model's parameters, and would miss vectors that are added later
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel")


class Report(NamedTuple):
    """Result of `apply_strategy`.

    Attributes:
        strategy: the strategy
        vectors: module names of the added scale vectors; not those that a norm keeps in its own form
        notes: (name, deviation from the strategy and its reason)
        difference: largest difference of the outputs before and after, relative to the largest output
        same_function: True if the strategy preserves the function (all but `dnp`) and `difference` is rounding
        stacked: vectors of stacked experts: their parameters have several axes, like those of matrices
    """

    strategy: ScaleStrategy
    vectors: tuple[str, ...]
    notes: tuple[tuple[str, str], ...]
    difference: float
    same_function: bool
    stacked: tuple[str, ...] = ()

    def __str__(self) -> str:
        effect = "the function is preserved" if self.same_function else "the function changes"
        head = f"{self.strategy}: {len(self.vectors)} scale vectors; {effect}, outputs differ by {self.difference:.1e}"
        names: dict[str, list[str]] = {}
        for name, note in self.notes:
            names.setdefault(note, []).append(name)
        rows = [f"  {_first_of(alike)}: {note}" for note, alike in names.items()]
        if self.stacked:
            what = "a row per expert, and so two axes; choose what decays, and what Muon updates, by role"
            rows.append(f"  {_first_of(self.stacked)}: {what}")
        return "\n".join([head, *rows])


def _first_of(names: Sequence[str]) -> str:
    """Return the first name, and the number of the others."""
    first, *others = names
    return f"{first} and {len(others)} more" if others else first


def apply_strategy(
    model: nn.Module,
    strategy: str | ScaleStrategy,
    example: Any = None,
    *,
    dp_at: Collection[str] = (),
    known: Mapping[str, ModelRole] | None = None,
) -> Report:
    """Add the scale vectors of a strategy to an existing model, in place.

    Matrices behind a norm become gamma_out * (W (gamma_in * xhat)) by parametrizations of their weights, with the
    norm's own gamma in gamma_in, so that the function is preserved. Norms without matrices keep their gamma, in the
    strategy's parameterization. Only `dnp` changes the function: it normalizes the outputs of nn.Linear layers, and is
    `dp` for other layers. `param_groups` then has the strategy's decay, and `fold_applied` removes the strategy.
    Vectors of a frozen matrix or norm are frozen.

    Args:
        model: a plain model on real tensors, before PEFT, DDP, sharding or compiling
        strategy: the strategy, for instance 'hg+dp+or+iwd'
        example: example inputs of the model, see `weight_decay_roles`
        dp_at: matrices that get `dp` instead of the strategy's `dnp`, by the last part of their names: ('lm_head',)
        known: roles by parameter name, for instance of a branch used only in training, which does not change

    Returns:
        A report with the largest difference of the outputs.

    Raises:
        ConfigError: the model cannot have this strategy; it is unchanged

    Warns:
        UserWarning: some vectors deviate from the strategy
    """
    words, options = expand_preset(strategy, ScaleOptions())
    parsed = ScaleStrategy.parse(words)
    dp_at = [dp_at] if isinstance(dp_at, str) else list(dp_at)
    check_module(model)
    model = uncompiled(model)
    _check(model)
    # Vectors made in inference mode could not train. `undo` restores the model unless all checks pass.
    with torch.inference_mode(False), ExitStack() as undo:
        traced = TracedModel(model, example, known)
        sites = find_sites(traced, bare=True)
        if not sites:
            raise ConfigError(f"{type(model).__name__} has no norm; expected a model with norms for a strategy.")
        if "lm_head" in options.placement_at:
            dp_at += _head_names(sites)
        before = _outputs(traced)
        change = Change(model, parsed, dp_at, sites, undo)
        # The vectors alone must preserve the function; only the norms of `dnp` may change it.
        without_norms = _outputs_of_vectors(traced, parsed)
        after = _outputs(traced) if change.outputs else without_norms
        difference, moved = _difference(before, after), _difference(before, without_norms)
        if not moved <= _rounding(traced):
            why = "because a matrix reads its scale vectors in a way that the trace does not show"
            found = f"{parsed} would change the outputs of {type(model).__name__} by {moved:.1e}"
            raise ConfigError(f"{found}, {why}. The model is unchanged.")
        vectors = {path: module for path, module in model.named_modules() if isinstance(module, ScaleVector)}
        stacked = [path for path, vector in vectors.items() if any(p.ndim > 1 for p in vector.parameters())]
        notes = (*change.notes, *_without_norm(traced, parsed, sites), *_unreached(traced))
        names = tuple(sorted(vectors))
        report = Report(parsed, names, notes, difference, not change.outputs, tuple(sorted(stacked)))
        if notes:
            warnings.warn(str(report), stacklevel=2)
        undo.pop_all()
    return report


def _head_names(sites: Sequence[Site]) -> list[str]:
    """Return the last part of the name of the output projection, if a site reaches it."""
    matrices = (matrix for site in sites for matrix in site.matrices)
    return sorted({matrix.word for matrix in matrices if matrix.role == "head"})


def _outputs_of_vectors(traced: TracedModel, strategy: ScaleStrategy) -> list[Tensor]:
    """Return the outputs without the norms of `dnp`, and check that the pass reads the vectors of each reached weight.

    Raises:
        ConfigError: the pass fails, or reads a weight by a reference that has no vectors
    """
    model, called = traced.model, set[str]()

    def note_call(module: Any, args: Any, out: Tensor) -> Any:
        called.add(module.site)
        return args[0] if isinstance(module, OutputNorm) else None  # replaces the result of the norm by its input

    added = [module for module in model.modules() if isinstance(module, Scaled)]
    layers = "layers that read a weight as an attribute in forward, such as self.weight."
    with ExitStack() as hooks:
        for module in added:
            hooks.enter_context(module.register_forward_hook(note_call))
        try:
            outputs = _outputs(traced)
        except (LookupError, TypeError, AttributeError, RuntimeError) as error:
            why = f"{type(model).__name__} fails with scale vectors ({type(error).__name__}: {error})"
            raise ConfigError(f"{why}; expected {layers}") from error
    for module in added:
        if module.site in called:
            continue
        if isinstance(module, OutputNorm) and f"{module.site}.weight" in traced.products:
            why = f"{strategy.placement} normalizes the output of {module.site}"
            hint = f"Use dp, or dp_at=({module.site.rpartition('.')[2]!r},)."
            raise ConfigError(f"{why}, but this model uses its weight without calling it. {hint}")
        if module.site in traced.products or module.site in traced.scaled:
            why = f"{module.site} is read by a stored reference, without its scale vectors"
            raise ConfigError(f"{why}; expected {layers}")
    return outputs


def _rounding(traced: TracedModel) -> float:
    """Return the largest difference attributed to rounding, by the narrowest dtype of the pass."""
    dtypes = {node.dtype for node in traced.flow.graph.nodes if node.kind in (PARAM, DATA)}
    return max(_ROUNDING.get(dtype, _ROUNDING_SHORT) for dtype in dtypes if dtype and dtype.is_floating_point)


def _without_norm(traced: TracedModel, strategy: ScaleStrategy, sites: list[Site]) -> Iterator[tuple[str, str]]:
    """Yield a note if the strategy adds vectors to matrices behind norms, and the layers have none, as in OLMo 2."""
    behind = {name for site in sites for name in site.readers}
    layers = {each.name for each in traced.roles.parameters if each.role == "matrix"}
    if (strategy.per_branch or strategy.placement_row.scale_out) and layers and not layers & behind:
        why = "none of the others follows a norm whose output only matrices read"
        yield type(traced.model).__name__, f"no matrix except the head gets a vector, because {why}"


def _unreached(traced: TracedModel) -> Iterator[tuple[str, str]]:
    """Yield notes on parameters that the forward pass did not reach."""
    for row in traced.roles.parameters:
        if row.name in traced.uses or row.name in traced.scaled:
            continue
        if row.name in traced.known and row.role in ("matrix", "router", "head"):
            yield row.name, "unchanged, not reached: its norm's vectors moved to other matrices"
        elif row.role == "other" and row.trained and row.name not in traced.known:
            yield row.name, "unchanged, because the forward pass did not reach it"


def _check(model: nn.Module) -> None:
    """Check that the weights of a model are those in its modules' code."""
    name, kinds = type(model).__name__, [type(module) for module in model.modules()]
    if any(isinstance(module, Scaled) or APPLIED in vars(module) for module in model.modules()):
        raise ConfigError(f"this {name} already has a strategy; call fold_applied(model) first.")
    built = any(isinstance(module, Backbone | ScaledLinear | ScaleVector) for module in model.modules())
    wanted = "a model without scale vectors of this package. Build this one with its strategy."
    expect(not built, "model", f"a {name} that was built with a strategy", wanted)
    lacking = [key for key, parameter in model.named_parameters() if parameter.is_meta or is_fake(parameter)]
    expect(not lacking, "model", f"without values ({', '.join(lacking[:1])})", "one with weights. Load them first.")
    wrapper = next((kind.__name__ for kind in kinds if kind.__name__ in _WRAPPERS), None)
    expect(wrapper is None, "model", f"wrapped in {wrapper}", "the model inside. Apply the strategy, then wrap it.")
    if any(kind.__module__.split(".")[0] == "peft" for kind in kinds):
        raise ConfigError(f"this {name} has PEFT layers; apply the strategy before PEFT.")
    if getattr(model, "is_quantized", False):
        raise ConfigError(f"this {name} is quantized; apply the strategy before quantization.")


def _outputs(traced: TracedModel) -> list[Tensor]:
    """Return the model's logits in eval mode, or all its outputs if none are called logits."""
    model, (args, kwargs) = traced.model, copied(traced.inputs)
    with tracing_state(model), torch.no_grad():
        out = model(*args, **kwargs)
    leaves = tree_leaves(logits_of(out))
    numbers = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not any(leaf.isfinite().any() for leaf in numbers):
        wanted = "finite floating-point numbers, to check that its function is preserved"
        hint = "Load the weights first, and let forward return a tensor, or a tuple, dict or dataclass of them."
        raise ConfigError(f"{type(model).__name__} returns {type(out).__name__}; expected {wanted}. {hint}")
    return numbers


def _difference(before: list[Tensor], after: list[Tensor]) -> float:
    """Return max |after - before| / max |before|, the largest of all outputs.

    Masked values, such as logits of -inf or the lowest number, must be equal, or the difference is infinite.
    """
    worst = 0.0
    for b, a in zip(before, after, strict=True):
        number = b.isfinite() & (b.abs() < torch.finfo(b.dtype).max / 2)
        if not torch.allclose(b[~number], a[~number], rtol=0, atol=0, equal_nan=True):
            return math.inf
        if number.any():
            b, a = b[number].double(), a[number].double()
            size = float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))
            worst = max(worst, size if math.isfinite(size) else math.inf)  # max() of a number and nan is the number
    return worst
