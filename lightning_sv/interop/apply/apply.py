"""A strategy on an existing model: planned, executed, and checked on real outputs."""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_sv.errors import ConfigError
from lightning_sv.interop.apply.execute import applied_modules, execute, strategy_chains, uncompiled
from lightning_sv.interop.apply.plan import Plan, Planner
from lightning_sv.interop.apply.sites import find_sites
from lightning_sv.nn import Backbone
from lightning_sv.roles.api import traced_roles
from lightning_sv.roles.classify import Classifier
from lightning_sv.roles.example_inputs import example_of
from lightning_sv.roles.forward import plain_output, tracing_state
from lightning_sv.roles.trace import DATA, PARAM
from lightning_sv.roles.types import ModelRole, Roles
from lightning_sv.scale import ScaleOptions, ScaleStrategy, ScaleVector

#: largest relative difference of outputs that is rounding
_ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4}
_ROUNDING_SHORT = 0.1
#: what hands a model's parameters to several processes, which must all know the vectors from the start
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel")


@dataclass(frozen=True)
class Report:
    """What `apply_strategy` did.

    Attributes:
        strategy: the four axes
        vectors: names of the scale vectors that train now, as modules of the model
        notes: (name, what is not as the strategy has it there, and why)
        difference: largest difference of the outputs before and after, relative to the largest output
        same_function: the strategy keeps the function (all but `dnp`), and `difference` is rounding
    """

    strategy: ScaleStrategy
    vectors: tuple[str, ...]
    notes: tuple[tuple[str, str], ...]
    difference: float
    same_function: bool

    def __str__(self) -> str:
        kept = "the function is kept" if self.same_function else "the function is another one"
        head = f"{self.strategy}: {len(self.vectors)} scale vectors; {kept}, outputs differ by {self.difference:.1e}"
        return "\n".join([head, *(f"  {name}: {note}" for name, note in self.notes)])


def apply_strategy(
    model: nn.Module,
    strategy: str | ScaleStrategy,
    example: Any = None,
    *,
    options: ScaleOptions | None = None,
    untie_head: bool = False,
    known: Mapping[str, ModelRole] | None = None,
) -> Report:
    """Give a model the scale vectors of a strategy, in place, around the weights that it has.

    Matrices that read a norm become gamma_out * (W (gamma_in * xhat)) by parametrizations of their weights, with the
    norm's own gamma in gamma_in, so that the function is kept; norms that no matrix reads keep their gamma, in the
    strategy's parameterization. `dnp` alone changes the function: it normalizes the outputs of nn.Linear layers. Take
    `param_groups` afterwards for the strategy's decay, and `fold_applied` to take it all away. Vectors train where what
    they stand for trains: those of a frozen matrix or norm are frozen.

    Args:
        model: a plain model on real tensors; before PEFT, DDP, sharding, compiling
        strategy: 'hg+dp+or+iwd'
        example: what the model is called with, see `weight_decay_roles`
        options: exceptions, by the last word of a matrix's name: {lm_head: bp}
        untie_head: give a head that is tied to the embedding a copy of its own, which can have vectors
        known: roles that you know yourself, by name, as of a branch that only training reaches: it is left as it is

    Returns:
        what was done, with the largest difference of the outputs

    Raises:
        ConfigError: the model cannot have this strategy; it is as it was

    Warns:
        UserWarning: what is not as the strategy has it
    """
    chosen = ScaleStrategy.parse(strategy)
    model = uncompiled(model)
    _check(model)
    args, kwargs = example_of(model, example)
    untied: AbstractContextManager[list[bool]] = _untied(model) if untie_head else nullcontext([])
    with untied as keep:
        try:
            trace, roles = traced_roles(model, example, known)
        except ConfigError:
            _check_numbers(model, [name for name, _ in model.named_parameters()])  # why it may have failed
            raise
        sites = find_sites(model, trace, roles, frozenset(known or ()), bare=True)
        if not sites:
            raise ConfigError(f"{type(model).__name__} has no norm that a strategy could act on.")
        _check_numbers(model, [name for site in sites for name in site.names])
        plan = Planner(model, chosen, options or ScaleOptions()).make(sites)
        _check_unparametrized(model, plan)
        before = _outputs(model, args, kwargs)
        with execute(model, plan) as undo:
            with _called(plan.outputs) as called:
                after = _outputs(model, args, kwargs)
            for path in plan.outputs:
                if path not in called and f"{path}.weight" in trace.products:
                    raise ConfigError(
                        f"dnp normalizes what {path} gives when it is called, and this model takes its weight without "
                        f"calling it; use dp, or options.placement_at {{{path.rpartition('.')[2]}: dp}}."
                    )
            difference, same = _difference(before, after), not plan.outputs
            if same and not difference <= _rounding(trace):
                raise ConfigError(
                    f"{chosen} would change what {type(model).__name__} computes, by {difference:.1e}: a matrix reads "
                    "its scale vectors in a way that the trace did not show; the model is as it was."
                )
            found = {path for path, module in model.named_modules() if isinstance(module, ScaleVector)}
            vectors = sorted(path for path in found if path.rpartition(".")[0] not in found)  # HeadShared holds one
            notes = (*plan.notes, *_unreached(trace, roles, known or {}))
            report = Report(chosen, tuple(vectors), notes, difference, same)
            if notes:
                warnings.warn(str(report), stacklevel=2)
            undo.pop_all()
        keep.append(True)
    return report


def _rounding(trace: Classifier) -> float:
    """Return the largest difference that rounding explains, in the shortest type of the pass."""
    dtypes = {node.dtype for node in trace.graph.nodes if node.kind in (PARAM, DATA)}
    return max(_ROUNDING.get(dtype, _ROUNDING_SHORT) for dtype in dtypes if dtype and dtype.is_floating_point)


def _unreached(trace: Classifier, roles: Roles, known: Mapping[str, ModelRole]) -> Iterator[tuple[str, str]]:
    """Yield notes on parameters that the pass did not reach."""
    note = "left as it is, for the pass did not reach it"
    for row in roles.parameters:
        if row.name in trace.uses or row.name in trace.scaled:
            continue
        if row.name in known and row.role in ("matrix", "router", "head"):
            why = "it reads what its norm gives without the vectors that other matrices have taken over"
            yield row.name, f"{note}: {why}"
        elif row.role == "other" and row.trained and row.name not in known:
            yield row.name, note


def _check(model: nn.Module) -> None:
    """Refuse models whose weights are not what their modules' code says."""
    name = type(model).__name__
    if isinstance(model, Backbone):
        raise ConfigError("a Backbone is built with its strategy: Backbone(config, strategy).")
    if applied_modules(model) or any(strategy_chains(module) for module in model.modules()):
        raise ConfigError(f"this {name} has a strategy already; fold_applied(model) takes it away first.")
    if wrappers := [type(module).__name__ for module in model.modules() if type(module).__name__ in _WRAPPERS]:
        raise ConfigError(
            f"{wrappers[0]} would not know of the vectors; apply the strategy to the model inside it, then wrap that."
        )
    if any(type(module).__module__.split(".")[0] == "peft" for module in model.modules()):
        raise ConfigError(f"this {name} has PEFT's layers; apply the strategy before them.")
    if getattr(model, "is_quantized", False):
        raise ConfigError(f"this {name} is quantized; apply the strategy to the model before that.")
    _check_numbers(model, [name for name, parameter in model.named_parameters() if parameter.is_meta])


def _check_numbers(model: nn.Module, names: Iterable[str]) -> None:
    """Refuse parameters that are not plain floating-point tensors."""
    for name in names:
        parameter = model.get_parameter(name)
        if not parameter.is_floating_point() or type(parameter.data) is not Tensor or parameter.is_meta:
            raise ConfigError(
                f"{name} is {parameter.dtype} in a {type(parameter.data).__name__} on {parameter.device.type}; a "
                "strategy needs plain numbers: not quantized, not sharded, not fake."
            )


def _check_unparametrized(model: nn.Module, plan: Plan) -> None:
    """Refuse to change parameters from which a parametrization computes another weight."""
    for name in (*plan.weights, *plan.gammas, *plan.values, *plan.frozen):
        path, parametrized, rest = name.rpartition("parametrizations.")
        if parametrized:
            owner, weight = path.rstrip("."), rest.partition(".")[0]
            raise ConfigError(
                f"{path}{weight} is parametrized already; end that first: torch.nn.utils.parametrize."
                f"remove_parametrizations(model.get_submodule({owner!r}), {weight!r})."
            )


@contextmanager
def _untied(model: nn.Module) -> Iterator[list[bool]]:
    """Give linear layers that share an embedding's table a copy; take it back unless something is put into the list."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    tied = [module for module in model.modules() if isinstance(module, nn.Linear) and id(module.weight) in tables]
    if not tied:
        raise ConfigError(f"untie_head: no linear layer of this {type(model).__name__} shares an embedding's table.")
    config = getattr(model, "config", None)
    was = [(module, module.weight) for module in tied], getattr(config, "tie_word_embeddings", None)
    keep: list[bool] = []
    try:
        for module in tied:
            module.weight = nn.Parameter(module.weight.detach().clone(), module.weight.requires_grad)
        if was[1] is not None:
            config.tie_word_embeddings = False  # type: ignore[union-attr]
        yield keep
    finally:
        if not keep:
            for module, weight in was[0]:
                module.weight = weight
            if was[1] is not None:
                config.tie_word_embeddings = was[1]  # type: ignore[union-attr]


@contextmanager
def _called(norms: Mapping[str, nn.Module]) -> Iterator[set[str]]:
    """Yield a set into which the names of those modules are put that are called meanwhile."""
    called: set[str] = set()
    handles = [norm.register_forward_hook(lambda *_, path=path: called.add(path)) for path, norm in norms.items()]
    try:
        yield called
    finally:
        for handle in handles:
            handle.remove()


def _outputs(model: nn.Module, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the logits that the model gives in eval mode, or all its numbers where none are called so.

    Raises:
        ConfigError: it gives none
    """
    with tracing_state(model), torch.no_grad():
        out = plain_output(model(*args, **kwargs))
    leaves = tree_leaves(out["logits"] if isinstance(out, dict) and "logits" in out else out)
    numbers = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not numbers:
        raise ConfigError(
            f"{type(model).__name__} gives no numbers ({type(out).__name__}) by which to check that its function is "
            "kept; let forward return a tensor, or a tuple, dict or dataclass of them."
        )
    return numbers


def _difference(before: list[Tensor], after: list[Tensor]) -> float:
    """Return max |after - before| / max |before|, the largest of all outputs.

    What is masked, as logits of no token by -inf or the lowest number, has no size: it must be the same, or the
    difference is infinite.
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
