"""How sharp a loss is in any set of parameters, and how its scale vectors precondition it.

A figure is a pure function of (loss closure, parameters); the parameters given are the subset:

    product = HessianProduct(lambda: loss(model), scale_vectors)
    lanczos(product).largest.value           # sharpness, with .error and .products

Own code, because no library gives these figures: curvlinops 3.0.1 differentiates by torch.func, which
refuses the autograd functions that fold scale vectors, installs torchvision, and has no errors of its
estimates; hessian-eigenthings 1.0.0a5 runs, but is an alpha, repeats forward and gradient at every
product, and has no Frobenius norm; PyHessian 0.1 takes all that trains in a model, by power iteration.
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
