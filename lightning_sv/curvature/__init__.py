"""Curvature of a loss in any subset of parameters, and preconditioning by scale vectors.

Estimates are pure functions of a loss closure and a subset of parameters:

    product = HessianProduct(lambda: loss(model), scale_vectors)
    lanczos(product).largest.value           # sharpness, with .error and .n_matvecs

Implemented here because no library provides these estimates: curvlinops 3.0.1 differentiates by torch.func, which
does not support the autograd functions that fold scale vectors, installs torchvision, and has no error
estimates; hessian-eigenthings 1.0.0a5 is an alpha, repeats forward and gradient for every product, and has no
Frobenius norm; PyHessian 0.1 uses all trainable parameters and power iteration.
"""

from lightning_sv.curvature.hvp import (
    DifferenceProduct,
    Estimate,
    HessianProduct,
    Product,
    twice_differentiable,
)
from lightning_sv.curvature.lanczos import Extremes, lanczos
from lightning_sv.curvature.preconditioner import (
    FlowPreconditioner,
    GammaFigures,
    ScaleField,
    column_eigenvalues,
    eigenvalue_range,
    gamma_figures,
    scale_field,
)
from lightning_sv.curvature.trace import Moments, hutchinson

__all__ = [
    "DifferenceProduct",
    "Estimate",
    "Extremes",
    "FlowPreconditioner",
    "GammaFigures",
    "HessianProduct",
    "Moments",
    "Product",
    "ScaleField",
    "column_eigenvalues",
    "eigenvalue_range",
    "gamma_figures",
    "hutchinson",
    "lanczos",
    "scale_field",
    "twice_differentiable",
]
