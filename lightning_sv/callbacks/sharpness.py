"""Sharpness of the held-out loss in all parameters and in the scale vectors, during a run."""

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args
from unittest.mock import patch

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_sv.callbacks.branch_norms import applied_strategies
from lightning_sv.callbacks.run_state import (
    StepTrigger,
    data_of,
    evaluation_mode,
    known_steps,
    log_spaced,
    model_of,
    settings_of,
)
from lightning_sv.callbacks.tensorboard_layout import Pages
from lightning_sv.callbacks.training_monitor import pause_throughput, write_scalars
from lightning_sv.curvature import DifferenceProduct, HessianProduct, hutchinson, lanczos
from lightning_sv.curvature.hvp import scalar_loss
from lightning_sv.errors import ConfigError, expect, expect_known
from lightning_sv.nn import (
    Backbone,
    BackboneConfig,
    activated_parameters,
    document_ids,
    flops_per_token,
    meta_backbone,
    next_token_loss,
)
from lightning_sv.optim import PARAMETER_ROLES, full_tensor, parameter_roles
from lightning_sv.optim.groups import is_sharded
from lightning_sv.scale import BranchGroup, RMSNorm, ScaledLinear, ScaleVector

log = logging.getLogger(__name__)

FIGURES = ("lambda_max", "trace", "fro2")
Method = Literal["exact", "difference"]
METHODS = get_args(Method)
#: subset -> its parameters; subsets of roles that a model lacks are empty
Subsets = dict[str, tuple[nn.Parameter, ...]]

# Costs in forward and backward passes over one sequence: the maximum over strategies in
# benchmarks/results/curvature.json. Products for scale vectors are cheaper than for all parameters.
GRAPH, PRODUCT, SCALE_PRODUCT = 1.49, 2.15, 1.71
#: Overhead of a product per block in FLOP, fitted to `unified` at d_model 64 on one CPU core.
OVERHEAD = 84e6
#: Fraction of the budget to plan for, because a small batch uses fewer cores than the training batch (`mini` on two
#: cores took 1.4 times the plan).
PLANNED = 0.6
#: Default limit on the tokens of a retained graph.
MOST_TOKENS = 4096
#: Default limit on the attention entries (blocks x heads x queries x keys) of a retained graph: math attention keeps
#: about six float32 copies of each, 18 GB in total.
MOST_ATTENTION = 750_000_000


def parameter_subsets(model: nn.Module) -> Subsets:
    """Return the trained parameters of `model` by role, layer and branch.

    all; matrix, router, head, embedding, scale_input, scale_output: by role; layer0, ...: one block;
    q_proj, ...: the weights of that name in every block, with their scale vectors;
    attn_norm, ...: the scale vectors of that norm.
    """
    ours = isinstance(model, Backbone)  # in a custom model, only scale vectors have a known role
    always = ("all", *map(_role_name, PARAMETER_ROLES if ours else ("input", "output")))
    subsets: dict[str, list[nn.Parameter]] = {name: [] for name in always}
    if ours:
        for named in parameter_roles(model):
            subsets["all"].append(named.parameter)
            subsets[_role_name(named.role)].append(named.parameter)
    else:
        subsets["all"] = list(model.parameters())
        for module in model.modules():
            if isinstance(module, ScaleVector):
                subsets[_role_name(module.role)].extend(module.parameters())
        for _, module, applied in applied_strategies(model):
            for role, parameter in applied.stored(module):
                subsets[_role_name(role)].append(parameter)
    sites: dict[str, list[nn.Parameter]] = defaultdict(list)
    for path, module in model.named_modules():
        parts = path.split(".")
        members = list(module.parameters())
        if parts[0] == "layers" and len(parts) == 2:
            sites[f"layer{parts[1]}"] = members
        elif isinstance(module, ScaledLinear | nn.Linear) or (isinstance(module, RMSNorm) and parts[-1] != "norm"):
            sites[parts[-1]] += members
        elif isinstance(module, BranchGroup):
            sites[module.site] += module.norm.parameters()
            for name in module.names:
                sites[name] += (p for vector in module.vectors(name) if vector is not None for p in vector.parameters())
    for _, module, applied in applied_strategies(model):
        for path, _, weight, sides in applied.branches(module):
            for vector in sides.values() if weight is not None else ():
                # a vector that stays in its norm is a function of the norm's parameter
                owned = vector.parameters() if isinstance(vector, nn.Module) else getattr(vector, "args", ())[:1]
                sites[path.rpartition(".")[2]] += owned
    subsets = subsets | sites | subsets  # 'router' keeps its meaning as a role
    trained = {name: tuple({id(p): p for p in each if p.requires_grad}.values()) for name, each in subsets.items()}
    return {name: members for name, members in trained.items() if members or name in always}


def _role_name(role: str) -> str:
    return f"scale_{role}" if role in ("input", "output") else role


def fitting_length(config: BackboneConfig, seq_len: int) -> int:
    """Return the tokens of a sequence used by an exact measurement: all, or 1/2, 1/4, ... to limit memory.

    >>> fitting_length(BackboneConfig(d_model=1792, n_layer=22, n_head=28), 4096)
    1024
    """
    while config.n_layer * config.n_head * seq_len**2 > MOST_ATTENTION and seq_len > 1:
        seq_len //= 2
    return seq_len


def fitting_sequences(
    config: BackboneConfig, seq_len: int, work: float, points: int, subsets: Sequence[str], products: int
) -> int:
    """Return the number of sequences per measurement, from the run's plan only.

    It depends on neither strategy nor measured times, and includes subsets that a strategy lacks, so compared runs use
    the same batch. The overhead of a product, most of its cost in a small model, is an estimate. `work` is the budget
    of all `points` of the run, in forward and backward passes over one sequence of `seq_len` tokens; `products`
    is the maximum per subset.
    """
    each = GRAPH + sum(products * (SCALE_PRODUCT if name.startswith("scale_") else PRODUCT) for name in subsets)
    flops = seq_len * flops_per_token(activated_parameters(meta_backbone(config), config), config, seq_len)
    n = PLANNED * work / points / each - OVERHEAD * config.n_layer / flops
    attention = config.n_layer * config.n_head * seq_len**2
    return max(1, min(int(n), MOST_TOKENS // seq_len, MOST_ATTENTION // attention))


def plain_copy(source: nn.Module, meta: Backbone, device: torch.device, *, keep: bool) -> Backbone | None:
    """Build an eager float32 backbone with the current weights of `source`, which may be compiled or sharded.

    `meta` is a backbone of the same sizes and strategy without storage. Gathering sharded weights is a collective:
    call it on every rank; those with `keep=False` return None. No random numbers are sampled.
    """
    copy = meta.to_empty(device=device) if keep else None
    if copy is not None:
        for new, old in zip(copy.parameters(), source.parameters(), strict=True):
            new.requires_grad_(old.requires_grad)
    target: dict[str, Tensor] = {} if copy is None else copy.state_dict()
    for key, value in source.state_dict().items():
        full = full_tensor(value)
        if copy is not None:
            target.pop(key).copy_(full)
    assert not target
    return copy


@dataclass
class _Progress:
    sequences: int = 0
    done: int = 0
    skipped: int = 0
    spent: float = 0.0  # seconds of measurements
    run: float = 0.0  # seconds of the run


@contextmanager
def _metrics_kept(module: nn.Module) -> Iterator[None]:
    """Leave the metrics of `module` as they are, although a training_step inside the context updates them."""
    metrics = [metric for metric in module.modules() if isinstance(metric, Metric)]
    kept = [dict(vars(metric)) for metric in metrics]
    for metric in metrics:
        for key in metric._defaults:  # an update may change these in place
            value = getattr(metric, key)
            setattr(metric, key, value.clone() if isinstance(value, Tensor) else list(value))
    try:
        yield
    finally:
        for metric, values in zip(metrics, kept, strict=True):
            vars(metric).update(values)


class Sharpness(L.Callback):
    """Log sharpness/{subset}/{lambda_max, trace, fro2} of the held-out loss, each with its error.

    The loss is the mean next-token loss in nats per token of one fixed batch, spread over the validation
    split, on an eager float32 copy of the weights. Training may therefore be compiled, sharded, in bfloat16 and with
    fused attention. The loss excludes a router's auxiliary loss; the selection of experts has zero curvature.
    lambda_max is computed by Lanczos (its error bounds the distance to an eigenvalue; if stopped early, the value is
    too low; see `curvature.lanczos`), trace and ||H||_F^2 by Hutchinson, with the same random vectors each time.
    Also logged: sharpness/{loss, seconds, products, sequences, skipped}. A measurement does not change the random
    state, weights or gradients of the run. Rank 0 computes while the others wait. Memory: the copy, the retained graph
    (`exact` keeps the T^2 attention entries, so only the beginning of long sequences is used, with a log message), and
    lanczos_steps vectors of a subset's size.

    If `loss` is given, that loss is measured on the training model of any class. The model must not be sharded.

    Args:
        subsets: names, see `parameter_subsets`: all, a role, a layer or a branch; roles without parameters are skipped
        points: maximum number of measurements: before the first step, then geometrically spaced from 1% of the run
        budget: maximum fraction of the run's time. The batch size is chosen accordingly; a measurement
            that would exceed it is skipped and counted in sharpness/skipped. The first and the last are never skipped
        sequences: batch size; null for the size that fits the budget by the run's plan, equal for every strategy
        method: exact: products on the graph of the gradient, with the math kernel of attention; difference:
            central differences of gradients, with the fused kernels and less memory (curvature.DifferenceProduct)
        lanczos_steps: maximum number of products per lambda_max; it stops once the error is below 1%
        hutchinson_probes: number of products per trace and squared Frobenius norm, at least 2
        loss: function of the LightningModule that returns a scalar loss of fixed data; null for the held-out loss of a
            `PretrainModule` with a `TokenDataModule`
        model: dotted name of the submodule with the parameters, with `loss`; null for the module itself

    Raises:
        ConfigError: a value out of range, an unknown subset, or no loss for other modules or data
    """

    def __init__(  # noqa: PLR0913
        self,
        subsets: Sequence[str] = ("all", "scale_input", "scale_output"),
        points: int = 9,
        budget: float = 0.05,
        sequences: int | None = None,
        method: Method = "exact",
        lanczos_steps: int = 7,
        hutchinson_probes: int = 2,
        loss: Callable[[L.LightningModule], Tensor | Mapping[str, Any] | None] | None = None,
        model: str | None = None,
    ):
        minima = {"points": (points, 2), "sequences": (sequences, 1)}
        minima |= {"lanczos_steps": (lanczos_steps, 1), "hutchinson_probes": (hutchinson_probes, 2)}
        for key, (value, least) in minima.items():
            expect(value is None or value >= least, f"{key} of Sharpness", value, f"at least {least}.")
        expect(0 < budget <= 1, "budget of Sharpness", budget, "a fraction of the run, above 0 up to 1.")
        expect(method in METHODS, "method of Sharpness", method, f"one of: {' '.join(METHODS)}.")
        expect(bool(subsets), "subsets of Sharpness", "empty", "at least one, for instance all.")
        self.subsets = (subsets,) if isinstance(subsets, str) else tuple(subsets)
        self.points, self.budget = points, budget
        self.sequences, self.method, self.loss, self.model = sequences, method, loss, model
        self.lanczos_steps, self.hutchinson_probes = lanczos_steps, hutchinson_probes
        self.clock: Callable[[], float] = time.perf_counter
        self._clock = StepTrigger("Sharpness")
        self._steps: frozenset[int] = frozenset()
        self._total = 0
        self._blocks: Tensor | None = None
        self._state = _Progress()
        self._began: float | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the batch size and the spent budget, so that a resumed run measures the same way."""
        return asdict(replace(self._state, run=self._elapsed()))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the checkpoint."""
        self._state = _Progress(**state_dict)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Check before training the subsets, and that a loss is available."""
        if stage == "fit" and self.loss is None:
            settings = settings_of(pl_module)
            plain = data_of(trainer) is not None and getattr(pl_module, "built_by", None) is None
            wanted = "a function of the LightningModule. Only a PretrainModule with a TokenDataModule has a default."
            expect(settings is not None and plain, "loss of Sharpness", None, wanted)
            assert settings is not None
            self._find(parameter_subsets(settings.meta()))

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find the trained parameters of the model, which is built by now."""
        model = model_of(pl_module, self.model)
        if self.loss is not None:
            wanted = "an unsharded one. Leave out loss to measure the held-out loss of a PretrainModule."
            expect(not any(map(is_sharded, model.parameters())), "the model of Sharpness", "sharded", wanted)
        known = parameter_subsets(model)
        self._find(known)
        # One config serves all strategies of a Backbone, and some strategies lack a role.
        if not any(isinstance(module, Backbone) for module in model.modules()):
            self._check_vectors(model, known)

    def _check_vectors(self, model: nn.Module, known: Subsets) -> None:
        scale_subsets = [name for name in self.subsets if name.startswith("scale_")]
        if not scale_subsets or known["scale_input"] or known["scale_output"]:
            return
        found = f"the model of Sharpness is {type(model).__name__}, without trained scale vectors"
        wanted = "a model built with ScaleBuilder, or one after apply_strategy"
        raise ConfigError(f"{found}; expected {wanted}. Otherwise leave {scale_subsets[0]} out of subsets.")

    def _find(self, known: Subsets) -> None:
        for name in self.subsets:
            expect_known("subset of Sharpness", name, known)
        self._present = tuple(name for name in dict.fromkeys(self.subsets) if known[name])

    def charts(self) -> Pages:
        """Return one page with a chart per metric and a line per subset."""
        tags = {figure: [f"sharpness/{name}/{figure}" for name in self._present] for figure in FIGURES}
        tags["cost"] = ["sharpness/seconds"]
        return {"sharpness": {chart: ["Multiline", lines] for chart, lines in tags.items()}}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Choose the steps and the batch, log them, and measure the initialization."""
        self._total = known_steps(trainer, "Sharpness")
        if trainer.global_step == 0:  # after an earlier fit
            self._state = _Progress()
        self._steps = frozenset(log_spaced(self._total, self.points))
        if self.loss is None:
            self._take_batch(trainer, pl_module)
        self._began = self.clock()
        self._clock.start(trainer)
        if trainer.global_step == 0:
            self._log(trainer, pl_module)

    def _take_batch(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Read the held-out batch, whose size follows from the run's plan."""
        data, settings = data_of(trainer), settings_of(pl_module)
        assert data is not None and settings is not None
        products = self.lanczos_steps + self.hutchinson_probes
        # A validation pass costs a third of a training pass. One device measures while the others wait.
        run = self._total * data.global_batch + data.validations * (data.val_sequences or 0) / 3
        exact = self.method == "exact"
        length = fitting_length(settings.backbone, data.seq_len) if exact else data.seq_len
        work = self.budget * run / trainer.world_size * data.seq_len / length
        fitting = fitting_sequences(settings.backbone, length, work, len(self._steps), self.subsets, products)
        self._state.sequences = self.sequences or self._state.sequences or fitting  # a resumed run keeps its batch size
        if trainer.is_global_zero:
            self._blocks = data.held_out(self._state.sequences)[:, : length + 1].to(pl_module.device)
            self._state.sequences = len(self._blocks)
            how = "exact products, math attention" if exact else "differences of gradients"
            batch = f"{len(self._steps)} measurements of {self._state.sequences} held-out sequences"
            if length < data.seq_len:
                batch += f", of their first {length:,} tokens (math attention on {data.seq_len:,} is too large)"
            log.info("sharpness: %s; %s, on an eager float32 copy", batch, how)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Measure when due."""
        if self._clock.ended(trainer) and self._clock.has_passed(self._steps):
            self._log(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the cost of the measurements."""
        if trainer.is_global_zero:
            share = self._state.spent / max(1e-9, self._elapsed())
            skipped = f", {self._state.skipped} skipped" if self._state.skipped else ""
            log.info("sharpness: %d measurements%s, %.1f%% of the run's time", self._state.done, skipped, 100 * share)

    def _elapsed(self) -> float:
        return self._state.run + (0.0 if self._began is None else self.clock() - self._began)

    def _affordable(self, step: int, total: int) -> bool:
        if step in (0, total) or not self._state.done:
            return True
        run = (self._elapsed() - self._state.spent) * total / step
        measuring = self._state.spent + 2 * self._state.spent / self._state.done
        return measuring <= self.budget * (run + measuring)

    def _log(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)  # pending steps count as training time
        start = self.clock()
        # Clocks differ between ranks, so rank 0 decides.
        if not trainer.strategy.broadcast(self._affordable(trainer.global_step, self._total)):
            self._state.skipped += 1
            write_scalars(trainer, {"sharpness/skipped": self._state.skipped})
            return
        try:
            scalars = self._of_copy(trainer, pl_module) if self.loss is None else self._of_model(pl_module)
        except torch.OutOfMemoryError as error:
            found = f"{self.method}, for which the memory of {pl_module.device} is too small"
            hint = "Set method: difference, or a lower number of sequences."
            raise ConfigError(f"method of Sharpness is {found}; expected a smaller measurement. {hint}") from error
        scalars |= {"seconds": self.clock() - start, "skipped": self._state.skipped}
        scalars = trainer.strategy.broadcast(scalars)  # callbacks of all ranks must monitor the same values
        self._state.done += 1
        seconds = scalars["seconds"]
        self._state.spent += seconds
        if self.loss is None:
            scalars["sequences"] = self._state.sequences
        write_scalars(trainer, {f"sharpness/{key}": value for key, value in scalars.items()})
        pause_throughput(trainer, seconds)

    def _of_copy(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, float]:
        """Measure the held-out loss on a copy of our backbone, on the first device."""
        settings, data = settings_of(pl_module), data_of(trainer)
        assert settings is not None and data is not None
        model = plain_copy(model_of(pl_module), settings.meta(), pl_module.device, keep=trainer.is_global_zero)
        if model is None:
            return {}
        assert self._blocks is not None
        tokens, targets = self._blocks[:, :-1], self._blocks[:, 1:]
        documents = document_ids(tokens, data.manifest.eot) if settings.mask_documents else None
        with torch.autocast(pl_module.device.type, enabled=False):
            return self._measure(parameter_subsets(model), lambda: next_token_loss(model(tokens, documents), targets))

    def _of_model(self, pl_module: L.LightningModule) -> dict[str, float]:
        """Measure the custom loss on the model itself, in evaluation mode, with the random state restored."""
        assert self.loss is not None
        given, devices = self.loss, [pl_module.device] if pl_module.device.type == "cuda" else []

        def loss() -> Any:
            before = [p._version for p in pl_module.parameters()]
            value: Any = given(pl_module)  # a training_step may return a dict
            trains = before != [p._version for p in pl_module.parameters()]
            wanted = "one without optimizer steps. In manual optimization, compute it without training_step."
            expect(not trains, "loss of Sharpness", "a function that changes the weights", wanted)
            return value.get("loss") if isinstance(value, Mapping) else value

        with (
            evaluation_mode(pl_module),
            _metrics_kept(pl_module),
            patch.object(pl_module, "log", lambda *args, **kwargs: None),  # a training_step would log this loss
            torch.random.fork_rng(devices),
            torch.autocast(pl_module.device.type, enabled=False),
        ):
            return self._measure(parameter_subsets(model_of(pl_module, self.model)), loss)

    def _measure(self, subsets: Subsets, loss: Callable[[], Tensor]) -> dict[str, float]:
        value = scalar_loss(loss()).item()
        if not math.isfinite(value):  # Lanczos would fail; the run itself stops at its next write
            return {"loss": value}
        scalars, spent = {"loss": value}, 0
        present = [name for name in self._present if subsets.get(name)]  # parameters may have been frozen since
        together = {id(p): p for name in present for p in subsets[name]}  # one graph for all subsets
        exact = HessianProduct(loss, tuple(together.values())) if self.method == "exact" and together else None
        for name in present:
            product = DifferenceProduct(loss, subsets[name]) if exact is None else exact.subset(subsets[name])
            sharpest = lanczos(product, self.lanczos_steps, rtol=1e-2)
            moments = hutchinson(product, self.hutchinson_probes)
            spent += sharpest.n_matvecs + moments.trace.n_matvecs
            for figure, estimate in zip(FIGURES, (sharpest, moments.trace, moments.squared_frobenius), strict=True):
                scalars |= {f"{name}/{figure}": estimate.value, f"{name}/{figure}_error": estimate.error}
        return scalars | {"products": spent}
