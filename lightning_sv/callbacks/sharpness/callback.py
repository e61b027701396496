"""The callback `Sharpness`: when to measure, on what, and where the figures go."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar
from unittest.mock import patch

import lightning as L
import torch
from torch import Tensor, nn

from lightning_sv.callbacks.logging import pause_throughput, write_scalars
from lightning_sv.callbacks.run_state import (
    StepTrigger,
    data_of,
    evaluation_mode,
    has_known_model,
    known_steps,
    log_spaced,
    model_of,
    settings_of,
)
from lightning_sv.callbacks.sharpness.batch_size import fitting_length, fitting_sequences
from lightning_sv.callbacks.sharpness.measure import (
    FIGURES,
    METHODS,
    Measurement,
    Method,
    metrics_kept,
)
from lightning_sv.callbacks.sharpness.model_copy import plain_copy
from lightning_sv.callbacks.sharpness.subsets import Subsets, parameter_subsets
from lightning_sv.callbacks.sharpness.time_budget import Spent, TimeBudget
from lightning_sv.callbacks.tensorboard_layout import Pages
from lightning_sv.errors import ConfigError, expect, expect_known
from lightning_sv.nn import Backbone, document_ids, next_token_loss
from lightning_sv.optim.groups import is_sharded

log = logging.getLogger(__name__)

#: a loss of the LightningModule; like a training_step it may return a dictionary
Loss = Callable[[L.LightningModule], Tensor | Mapping[str, Any] | None]


class Sharpness(L.Callback):
    """Log sharpness/{subset}/{lambda_max, trace, fro2} of the held-out loss, each with its error.

    The loss is the mean next-token loss in nats per token of one fixed batch, spread over the
    validation split, on an eager float32 copy of the weights. Training may therefore be compiled,
    sharded, in bfloat16 and with fused attention. The loss excludes a router's auxiliary loss; the
    selection of experts has zero curvature. lambda_max is computed by Lanczos (its error bounds the
    distance to an eigenvalue; if stopped early, the value is too low; see `curvature.lanczos`),
    trace and ||H||_F^2 by Hutchinson, with the same random vectors each time. Also logged:
    sharpness/{loss, seconds, products, sequences, skipped}. A measurement does not change the
    random state, weights or gradients of the run. Rank 0 computes while the others wait. Memory:
    the copy, the retained graph (`exact` keeps the T^2 attention entries, so only the beginning of
    long sequences is used, with a log message), and lanczos_steps vectors of a subset's size.

    If `loss` is given, that loss is measured on the training model of any class. The model must not
    be sharded.

    Args:
        subsets: names, see `parameter_subsets`: all, a role, a layer or a branch; roles without
            parameters are skipped
        points: maximum number of measurements: before the first step, then geometrically spaced
            from 1% of the run
        budget: maximum fraction of the run's time. The batch size is chosen accordingly; a
            measurement that would exceed it is skipped and counted in sharpness/skipped. The first
            and the last are never skipped
        sequences: batch size; null for the size that fits the budget by the run's plan, equal for
            every strategy
        method: exact: products on the graph of the gradient, with the math kernel of attention;
            difference: central differences of gradients, with the fused kernels and less memory
            (curvature.DifferenceProduct)
        lanczos_steps: maximum number of products per lambda_max; it stops once the error is below
            1%
        hutchinson_probes: number of products per trace and squared Frobenius norm, at least 2
        loss: function of the LightningModule that returns a scalar loss of fixed data; null for the
            held-out loss of a `PretrainModule` with a `TokenDataModule`
        model: dotted name of the submodule with the parameters, with `loss`; null for the module
            itself

    Raises:
        ConfigError: a value out of range, an unknown subset, or no loss for other modules or data
    """

    #: first parts of the tags that it writes
    tags: ClassVar[tuple[str, ...]] = ("sharpness",)

    def __init__(  # noqa: PLR0913
        self,
        subsets: Sequence[str] = ("all", "scale_input", "scale_output"),
        points: int = 9,
        budget: float = 0.05,
        sequences: int | None = None,
        method: Method = "exact",
        lanczos_steps: int = 7,
        hutchinson_probes: int = 2,
        loss: Loss | None = None,
        model: str | None = None,
    ):
        _expect_at_least("points", points, 2)
        _expect_at_least("lanczos_steps", lanczos_steps, 1)
        _expect_at_least("hutchinson_probes", hutchinson_probes, 2)
        if sequences is not None:
            _expect_at_least("sequences", sequences, 1)
        fraction = "a fraction of the run, above 0 up to 1."
        expect(0 < budget <= 1, "budget of Sharpness", budget, fraction)
        methods = f"one of: {' '.join(METHODS)}."
        expect(method in METHODS, "method of Sharpness", method, methods)
        expect(len(subsets) > 0, "subsets of Sharpness", "empty", "at least one, such as all.")

        self.subsets = (subsets,) if isinstance(subsets, str) else tuple(subsets)
        self.points = points
        self.sequences = sequences
        self.method = method
        self.loss = loss
        self.model = model
        self.lanczos_steps = lanczos_steps
        self.hutchinson_probes = hutchinson_probes
        self.time = TimeBudget(budget)
        self._clock = StepTrigger("Sharpness")
        self._present: tuple[str, ...] = ()  # subsets that the model has
        self._steps: frozenset[int] = frozenset()
        self._total = 0
        self._blocks: Tensor | None = None  # (sequences, T + 1) token ids, on rank 0

    def state_dict(self) -> dict[str, Any]:
        """Return the batch size and the spent budget, so that a resumed run measures alike."""
        return self.time.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the checkpoint."""
        self.time.so_far = Spent(**state_dict)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Check before training the subsets, and that a loss is available."""
        if stage != "fit" or self.loss is not None:
            return
        if not has_known_model(trainer, pl_module):
            expected = "a function of the LightningModule."
            hint = "Only a PretrainModule with a TokenDataModule has a default."
            raise ConfigError(f"loss of Sharpness is None; expected {expected} {hint}")
        module: Any = pl_module
        self._find(parameter_subsets(module.settings.plan.meta()))

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find the trained parameters of the model, which is built by now."""
        model = model_of(pl_module, self.model)
        if self.loss is not None and any(map(is_sharded, model.parameters())):
            hint = "Leave out loss to measure the held-out loss of a PretrainModule."
            raise ConfigError(
                f"the model of Sharpness is sharded; expected an unsharded one. {hint}"
            )
        known = parameter_subsets(model)
        self._find(known)
        # One config serves all strategies of a Backbone, and some strategies lack a role.
        has_backbone = any(isinstance(module, Backbone) for module in model.modules())
        if not has_backbone:
            self._check_vectors(model, known)

    def _find(self, known: Subsets) -> None:
        for name in self.subsets:
            expect_known("subset of Sharpness", name, known)
        self._present = tuple(name for name in dict.fromkeys(self.subsets) if known[name])

    def _check_vectors(self, model: nn.Module, known: Subsets) -> None:
        if known["scale_input"] or known["scale_output"]:
            return
        scale_subsets = [name for name in self.subsets if name.startswith("scale_")]
        if not scale_subsets:
            return
        found = f"the model of Sharpness is {type(model).__name__}, without trained scale vectors"
        expected = "a model built with ScaleBuilder, or one after apply_strategy"
        hint = f"Otherwise leave {scale_subsets[0]} out of subsets."
        raise ConfigError(f"{found}; expected {expected}. {hint}")

    def charts(self) -> Pages:
        """Return one page with a chart per metric and a line per subset."""
        page = {}
        for figure in FIGURES:
            lines = [f"sharpness/{name}/{figure}" for name in self._present]
            page[figure] = ["Multiline", lines]
        page["cost"] = ["Multiline", ["sharpness/seconds"]]
        return {"sharpness": page}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Choose the steps and the batch, log them, and measure the initialization."""
        is_new = trainer.global_step == 0
        self._total = known_steps(trainer, "Sharpness")
        self._steps = frozenset(log_spaced(self._total, self.points))
        self.time.start(is_new=is_new)
        if self.loss is None:
            self._take_batch(trainer, pl_module)
        self._clock.start(trainer)
        if is_new:
            self._log(trainer, pl_module)

    def _take_batch(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Read the held-out batch, whose size follows from the run's plan."""
        data = data_of(trainer)
        settings = settings_of(pl_module)
        assert data is not None and settings is not None
        is_exact = self.method == "exact"
        backbone = settings.backbone
        length = fitting_length(backbone, data.seq_len) if is_exact else data.seq_len

        # A validation pass costs a third of a training pass. One device measures while the others
        # wait.
        validation = data.validations * (data.val_sequences or 0) / 3
        run = self._total * data.global_batch + validation
        work = self.time.share * run / trainer.world_size * data.seq_len / length
        products = self.lanczos_steps + self.hutchinson_probes
        fitting = fitting_sequences(
            backbone, length, work, len(self._steps), self.subsets, products
        )
        resumed = self.time.so_far.sequences  # a resumed run keeps its batch size
        self.time.so_far.sequences = self.sequences or resumed or fitting
        if trainer.is_global_zero:
            blocks = data.held_out(self.time.so_far.sequences)[:, : length + 1]
            self._blocks = blocks.to(pl_module.device)
            self.time.so_far.sequences = len(blocks)
            self._log_plan(length, data.seq_len)

    def _log_plan(self, length: int, seq_len: int) -> None:
        n_sequences = self.time.so_far.sequences
        batch = f"{len(self._steps)} measurements of {n_sequences} held-out sequences"
        if length < seq_len:
            reason = f"math attention on {seq_len:,} is too large"
            batch += f", of their first {length:,} tokens ({reason})"
        how = "differences of gradients"
        if self.method == "exact":
            how = "exact products, math attention"
        log.info("sharpness: %s; %s, on an eager float32 copy", batch, how)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure when due."""
        if self._clock.ended(trainer) and self._clock.has_passed(self._steps):
            self._log(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the cost of the measurements."""
        if not trainer.is_global_zero:
            return
        so_far = self.time.so_far
        percent = 100 * so_far.spent / max(1e-9, self.time.elapsed())
        skipped = f", {so_far.skipped} skipped" if so_far.skipped else ""
        text = "sharpness: %d measurements%s, %.1f%% of the run's time"
        log.info(text, so_far.done, skipped, percent)

    def _log(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure and write, unless the time is used up."""
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)  # pending steps count as training time
        start = self.time.clock()
        affordable = self.time.affords(trainer.global_step, self._total)
        if not trainer.strategy.broadcast(affordable):  # clocks differ, so rank 0 decides
            self.time.so_far.skipped += 1
            write_scalars(trainer, {"sharpness/skipped": self.time.so_far.skipped})
            return

        scalars = self._measured(trainer, pl_module)
        scalars["seconds"] = self.time.clock() - start
        scalars["skipped"] = self.time.so_far.skipped
        # callbacks of all ranks must monitor the same values
        scalars = trainer.strategy.broadcast(scalars)
        self.time.measured(scalars["seconds"])
        if self.loss is None:
            scalars["sequences"] = self.time.so_far.sequences
        write_scalars(trainer, {f"sharpness/{key}": value for key, value in scalars.items()})
        pause_throughput(trainer, scalars["seconds"])

    def _measured(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, float]:
        try:
            if self.loss is None:
                return self._of_copy(trainer, pl_module)
            return self._of_model(pl_module, self.loss)
        except torch.OutOfMemoryError as error:
            small = f"the memory of {pl_module.device} is too small"
            hint = "Set method: difference, or a lower number of sequences."
            raise ConfigError(
                f"method of Sharpness is {self.method}, for which {small}; "
                f"expected a smaller measurement. {hint}"
            ) from error

    def _of_copy(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, float]:
        """Measure the held-out loss on a copy of our backbone, on the first device."""
        settings = settings_of(pl_module)
        data = data_of(trainer)
        assert settings is not None and data is not None
        model = plain_copy(
            model_of(pl_module),
            settings.plan.meta(),
            pl_module.device,
            keep=trainer.is_global_zero,
        )
        if model is None:
            return {}
        assert self._blocks is not None
        tokens = self._blocks[:, :-1]  # B T
        targets = self._blocks[:, 1:]  # B T
        documents = None
        if settings.mask_documents:
            documents = document_ids(tokens, data.manifest.eot)

        def loss() -> Tensor:
            return next_token_loss(model(tokens, documents), targets)

        with torch.autocast(pl_module.device.type, enabled=False):
            return self._measure(parameter_subsets(model), loss)

    def _of_model(self, pl_module: L.LightningModule, given: Loss) -> dict[str, float]:
        """Measure the custom loss on the model itself, and leave the module as it was."""
        on_gpu = pl_module.device.type == "cuda"
        devices = [pl_module.device] if on_gpu else []

        def loss() -> Any:
            versions = [parameter._version for parameter in pl_module.parameters()]
            value: Any = given(pl_module)
            if versions != [parameter._version for parameter in pl_module.parameters()]:
                expected = "one without optimizer steps"
                hint = "In manual optimization, compute it without training_step."
                raise ConfigError(
                    "loss of Sharpness is a function that changes the weights; "
                    f"expected {expected}. {hint}"
                )
            return value.get("loss") if isinstance(value, Mapping) else value

        with (
            evaluation_mode(pl_module),
            metrics_kept(pl_module),
            # a training_step would log this loss
            patch.object(pl_module, "log", lambda *args, **kwargs: None),
            torch.random.fork_rng(devices),
            torch.autocast(pl_module.device.type, enabled=False),
        ):
            return self._measure(parameter_subsets(model_of(pl_module, self.model)), loss)

    def _measure(self, subsets: Subsets, loss: Callable[[], Tensor]) -> dict[str, float]:
        measurement = Measurement(
            self._present, self.method, self.lanczos_steps, self.hutchinson_probes
        )
        return measurement.figures(subsets, loss)


def _expect_at_least(key: str, value: int, least: int) -> None:
    expect(value >= least, f"{key} of Sharpness", value, f"at least {least}.")
