"""The figures of one measurement of sharpness."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, get_args

from torch import Tensor, nn
from torchmetrics import Metric

from lightning_sv.callbacks.sharpness.subsets import Subsets
from lightning_sv.curvature import DifferenceProduct, HessianProduct, hutchinson, lanczos
from lightning_sv.curvature.hvp import scalar_loss

FIGURES = ("lambda_max", "trace", "fro2")
Method = Literal["exact", "difference"]
METHODS = get_args(Method)


@dataclass(frozen=True)
class Measurement:
    """What to measure, and how.

    Attributes:
        subsets: names of the subsets, in the order of the figures
        method: 'exact' or 'difference', as in `Sharpness`
        lanczos_steps: maximum number of products per lambda_max
        hutchinson_probes: number of products per trace and squared Frobenius norm
    """

    subsets: Sequence[str]
    method: Method
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
    ) -> Iterator[tuple[str, HessianProduct | DifferenceProduct]]:
        """Yield the Hessian-vector product of each subset; exact ones share one graph."""
        if self.method == "difference":
            for name in names:
                yield name, DifferenceProduct(loss, parameters[name])
            return

        if not names:
            return
        members = chain.from_iterable(parameters[name] for name in names)
        together = tuple(dict.fromkeys(members))  # each once
        product = HessianProduct(loss, together)
        for name in names:
            yield name, product.subset(parameters[name])


@contextmanager
def metrics_kept(module: nn.Module) -> Iterator[None]:
    """Leave the metrics of `module` as they are, although a training_step inside updates them."""
    kept: dict[Metric, dict[str, Any]] = {}
    for metric in module.modules():
        if isinstance(metric, Metric):
            kept[metric] = dict(vars(metric))
            # an update may change the states in place, so that it gets copies
            vars(metric).update(metric._copy_state_dict())
    try:
        yield
    finally:
        for metric, values in kept.items():
            vars(metric).update(values)
