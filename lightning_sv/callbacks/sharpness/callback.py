"""The callback `Sharpness`: when to measure, and where the figures go."""

import time
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from torch import nn

from lightning_sv.callbacks.measuring import measuring
from lightning_sv.callbacks.run_state import model_of
from lightning_sv.callbacks.sharpness.held_out_loss import HeldOutLoss
from lightning_sv.callbacks.sharpness.measure import MeasuredLoss, Measurement
from lightning_sv.callbacks.sharpness.own_loss import Loss, OwnLoss
from lightning_sv.callbacks.sharpness.subsets import Subsets, parameter_subsets
from lightning_sv.callbacks.step_callback import StepCallback
from lightning_sv.callbacks.steps import known_steps, log_spaced
from lightning_sv.errors import ConfigError, expect, expect_known
from lightning_sv.nn import Backbone


class Sharpness(StepCallback):
    """Log sharpness/{subset}/{lambda_max, trace, fro2} of the held-out loss, each with its error.

    The loss is the mean next-token loss in nats per token of one fixed batch, spread over the
    validation split, on an eager float32 copy of the weights. Training may therefore be compiled,
    sharded, in bfloat16 and with fused attention. The loss excludes a router's auxiliary loss; the
    selection of experts has zero curvature. lambda_max is computed by Lanczos, trace and ||H||_F^2
    by Hutchinson, with the same random vectors each time. The error of lambda_max bounds its
    distance to an eigenvalue; above 1%, lambda_max is only a lower bound (`curvature.lanczos`).
    Also logged: sharpness/{loss, seconds, products, sequences}. A measurement does not change the
    random state, weights or gradients of the run. Rank 0 computes while the others wait. It takes
    at most lanczos_steps + hutchinson_probes products per subset, and a product about as long as
    three training steps on its sequences.
    Memory: the copy, the retained graph (it keeps the T^2 attention entries, so only the beginning
    of long sequences is used, with a log message), and lanczos_steps vectors of a subset's size.

    If `loss` is given, that loss is measured on the training model of any class. The model must not
    be sharded.

    Args:
        subsets: names, see `parameter_subsets`: all, or a role; roles without parameters are
            skipped
        points: maximum number of measurements: before the first step, then geometrically spaced
            from 1% of the run
        sequences: held-out sequences of a measurement, without `loss`
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

    tag = "sharpness"

    def __init__(
        self,
        subsets: Sequence[str] = ("all", "scale_input", "scale_output"),
        points: int = 9,
        sequences: int = 1,
        lanczos_steps: int = 12,
        hutchinson_probes: int = 2,
        loss: Loss | None = None,
        model: str | None = None,
    ):
        super().__init__(model=model)
        self.expect_at_least("points", points, 2)
        self.expect_at_least("lanczos_steps", lanczos_steps, 1)
        self.expect_at_least("hutchinson_probes", hutchinson_probes, 2)
        self.expect_at_least("sequences", sequences, 1)
        expect(len(subsets) > 0, "subsets of Sharpness", "empty", "at least one, such as all.")

        names = (subsets,) if isinstance(subsets, str) else tuple(dict.fromkeys(subsets))
        self.measurement = Measurement(names, lanczos_steps, hutchinson_probes)
        self.points = points
        self.loss: MeasuredLoss = HeldOutLoss(self.measurement, sequences)
        if loss is not None:
            self.loss = OwnLoss(self.measurement, loss, model)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Check that the model has the subsets, and that a loss is available."""
        self.loss.check(trainer, pl_module)
        model = model_of(pl_module, self.model)
        known = parameter_subsets(model)
        for name in self.measurement.subsets:
            expect_known("subset of Sharpness", name, known)
        # One config serves all strategies of a Backbone, and some strategies lack a role.
        has_backbone = any(isinstance(module, Backbone) for module in model.modules())
        if not has_backbone:
            self._check_vectors(model, known)

    def _check_vectors(self, model: nn.Module, known: Subsets) -> None:
        if known["scale_input"] or known["scale_output"]:
            return
        found = f"the model of Sharpness is {type(model).__name__}, without trained scale vectors"
        expected = "a model built with ScaleBuilder, or one after apply_strategy"
        for name in self.measurement.subsets:
            if name.startswith("scale_"):
                hint = f"Otherwise leave {name} out of subsets."
                raise ConfigError(f"{found}; expected {expected}. {hint}")

    def chosen_steps(self, trainer: L.Trainer) -> list[int]:
        """Return 0, and geometrically spaced steps to the end of the run."""
        return log_spaced(known_steps(trainer, self.name), self.points)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Read the batch, and measure the initialization."""
        self.loss.start(trainer, pl_module)
        super().on_train_start(trainer, pl_module)

    def act(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Measure and write."""
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)  # pending steps count as training time
        with measuring(trainer):
            start = time.perf_counter()
            figures = self._figures(trainer, pl_module)
            figures["seconds"] = time.perf_counter() - start
            # callbacks of all ranks must monitor the same values
            figures = trainer.strategy.broadcast(figures)
        self.write(trainer, figures)

    def _figures(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, float]:
        try:
            return self.loss.figures(trainer, pl_module)
        except torch.OutOfMemoryError as error:
            found = f"too large for the memory of {pl_module.device}"
            hint = "Lower sequences or lanczos_steps, or the batch of your own loss."
            raise ConfigError(
                f"a measurement of Sharpness is {found}; expected a smaller one. {hint}"
            ) from error
