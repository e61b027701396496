"""Curvature of a loss in any subset of parameters.

Estimates are pure functions of a loss closure and a subset of parameters:

    product = HessianProduct(lambda: loss(model), scale_vectors)
    lanczos(product).value           # sharpness, with .error and .n_matvecs

Libraries lack parts of it: curvlinops 3.0.1 returns no errors, and differentiates by torch.func,
which does not support our experts; hessian-eigenthings 1.0.0a5 repeats forward and gradient for
every product and has no Frobenius norm; PyHessian 0.1 uses all trainable parameters and power
iteration.
"""

from lightning_sv.curvature.hvp import (
    Estimate,
    HessianProduct,
    Product,
    twice_differentiable,
)
from lightning_sv.curvature.spectrum import Moments, hutchinson, lanczos

__all__ = [
    "Estimate",
    "HessianProduct",
    "Moments",
    "Product",
    "hutchinson",
    "lanczos",
    "twice_differentiable",
]
