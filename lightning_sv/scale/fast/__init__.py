"""Hand-written derivatives for eager mode.

The problem: autograd saves every intermediate result. RMSNorm in plain PyTorch keeps four tensors
of the size of x, a folded matrix is kept next to the matrix, and the logits of a large vocabulary
are the largest tensor of a step. The compiler removes all of this; eager mode, which most runs on a
CPU and all debugging use, does not.

So functions of `scale/definitions.py` have counterparts here, in three parts:

    def normalize(...)              chooses: the definition, or the class below
    class _Normalize(Function)      forward in few passes; saves its inputs and little else
        forward, backward           backward recomputes the rest
    second derivatives              of the definition, by `definition_gradients` (curvature needs
    them)

Results equal those of the definition up to rounding; tests/nn and tests/scale compare values,
gradients and second derivatives in float64.
"""

from lightning_sv.scale.fast.cross_entropy import linear_cross_entropy
from lightning_sv.scale.fast.fold import effective_weight, scaled_product
from lightning_sv.scale.fast.gram import inverse_rms_of_product
from lightning_sv.scale.fast.grouped import Rows, grouped_product
from lightning_sv.scale.fast.norm import normalize
from lightning_sv.scale.fast.swiglu import normed_swiglu, swiglu

__all__ = [
    "Rows",
    "effective_weight",
    "grouped_product",
    "inverse_rms_of_product",
    "linear_cross_entropy",
    "normalize",
    "normed_swiglu",
    "scaled_product",
    "swiglu",
]
