"""The figures of one measurement of sharpness, and the losses that can be measured."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import lightning as L
from torch import Tensor

from lightning_sv.callbacks.sharpness.subsets import Subsets
from lightning_sv.curvature import HessianProduct, hutchinson, lanczos
from lightning_sv.curvature.hvp import scalar_loss

FIGURES = ("lambda_max", "trace", "fro2")


@dataclass(frozen=True)
class Measurement:
    """What to measure, and how.

    Attributes:
        subsets: names of the subsets, in the order of the figures
        lanczos_steps: maximum number of products per lambda_max
        hutchinson_probes: number of products per trace and squared Frobenius norm
    """

    subsets: Sequence[str]
    lanczos_steps: int
    hutchinson_probes: int

    def figures(self, parameters: Subsets, loss: Callable[[], Tensor]) -> dict[str, float]:
        """Return loss, 'SUBSET/FIGURE' with its error, and the number of products."""
        scalars = {"loss": scalar_loss(loss()).item()}
        if not math.isfinite(scalars["loss"]):
            return scalars  # Lanczos would fail; the run itself stops at its next write

        n_products = 0
        # parameters may have been frozen since the start of the run
        present = [name for name in self.subsets if parameters.get(name)]
        for name, product in self._products(present, parameters, loss):
            sharpest = lanczos(product, self.lanczos_steps, rtol=1e-2)
            moments = hutchinson(product, self.hutchinson_probes)
            n_products += sharpest.n_matvecs + moments.trace.n_matvecs
            estimates = (sharpest, moments.trace, moments.squared_frobenius)
            for figure, estimate in zip(FIGURES, estimates, strict=True):
                scalars[f"{name}/{figure}"] = estimate.value
                scalars[f"{name}/{figure}_error"] = estimate.error
        scalars["products"] = n_products
        return scalars

    def _products(
        self, names: Sequence[str], parameters: Subsets, loss: Callable[[], Tensor]
    ) -> Iterator[tuple[str, HessianProduct]]:
        """Yield the Hessian-vector product of each subset; all share one graph."""
        if not names:
            return
        members = chain.from_iterable(parameters[name] for name in names)
        together = tuple(dict.fromkeys(members))  # each once
        product = HessianProduct(loss, together)
        for name in names:
            yield name, product.subset(parameters[name])


class MeasuredLoss:
    """A loss whose sharpness is measured, and the model whose parameters it depends on."""

    def check(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Raise ConfigError if the module has no such loss, or cannot be measured."""

    def start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Prepare the measurements."""

    def figures(self, trainer: L.Trainer, module: L.LightningModule) -> dict[str, float]:
        """Measure, called on every rank; the figures of the first rank are written."""
        raise NotImplementedError
