"""Linear branches of a normalized input, with their scale vectors.

    xhat = Norm(x)  --[scale_in]-->  W  --[Norm]-->  [scale_out]-->  y          [..] optional

Every strategy of the paper is a choice of the optional parts (Sections 3.1 and 3.2), and of their
owners:

    x -> [norm: xhat, shared scale_in] -> q_proj: own scale_in, W, norm, own scale_out
                                       -> k_proj: ...
                                       -> v_proj: ...

`Branch` is what a model requests for one branch; `ScaledLinear` is the branch with the parts of a
strategy. `BranchGroup` is the norm with its branches. Vectors on the side of the product with W are
folded into it (fast/fold.py), so own vectors cost nearly nothing. Shapes: B batch, T positions,
d_in width of the norm, d_out width of a branch.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from lightning_sv.errors import expect
from lightning_sv.scale.fast import Rows, grouped_product, normalize, scaled_product
from lightning_sv.scale.norm import RMSNorm
from lightning_sv.scale.shapes import Float
from lightning_sv.scale.state_record import Recorded, RecordedModule
from lightning_sv.scale.vector import ScaleVector, gamma_of

#: Role of a matrix in the model, read by the optimizer. matrix: inside a block; router: scores
#: experts; head: logits.
MatrixRole = Literal["matrix", "router", "head"]


class Branch(NamedTuple):
    """Shape and role of a branch that a model requests.

    Attributes:
        d_out: width of the output
        dnp_width: number of output channels normalized together under `dnp`, for instance the head
            dimension; None if the branch is never normalized, also not under `dnp`
        batch_dims: leading axes, (n_expert,) for one matrix per expert
        role: role of the matrix in the model
        n_head: number of heads in the output; None if it has no heads
    """

    d_out: int
    dnp_width: int | None
    batch_dims: tuple[int, ...] = ()
    role: MatrixRole = "matrix"
    n_head: int | None = None

    def check(self, name: str) -> None:
        """Raise ConfigError if a width does not divide the output."""
        expected = f"a divisor of its d_out, {self.d_out}, or None."
        for key in ("dnp_width", "n_head"):
            divisor = getattr(self, key)
            if divisor is not None:
                divides = divisor > 0 and self.d_out % divisor == 0
                expect(divides, f"{key} of {name}", divisor, expected)


class Output(NamedTuple):
    """Output of a branch before its norm and output-side scale vector.

    Attributes:
        product: product of the matrix and the factors applied before the norm, (..., d_out)
        norm_width: number of channels per normalized group; None if `product` is the output
        eps: epsilon of the norm
        gamma: scale applied after the norm, (d_out,); None for 1
    """

    product: Tensor
    norm_width: int | None
    eps: float
    gamma: Tensor | None

    @property
    def has_one_norm(self) -> bool:
        """True if one norm covers all channels."""
        return self.norm_width == self.product.shape[-1]

    def finish(self) -> Tensor:
        """Apply the norm and the scale, (..., d_out)."""
        if self.norm_width is None:
            return self.product
        if self.has_one_norm:
            return normalize(self.product, self.eps, self.gamma)

        sizes = (-1, self.norm_width)
        heads = self.product.unflatten(-1, sizes)  # (..., heads, norm_width)
        gamma = self.gamma
        if gamma is not None:
            gamma = gamma.unflatten(-1, sizes)
        return normalize(heads, self.eps, gamma).flatten(-2)


class ScaledLinear(RecordedModule):
    """y = scale_out * Norm(W (scale_in * xhat)), no bias; each part but W optional.

    Not a subclass of nn.Linear: tools that replace Linears by type would silently drop the scales.

    Args:
        d_in: width of the input
        d_out: width of the output
        scale_in: the branch's own input-side vector, width d_in
        scale_out: the output-side vector, width d_out
        norm_width: number of output channels normalized together: the head dimension for q, k, v,
            otherwise d_out; None for no normalization
        eps: epsilon of the normalization
        batch_dims: leading axes of weight and vectors, (n_expert,) for one matrix per expert
        role: role of the matrix in the model
    """

    recorded = Recorded(
        "norm_width",
        name="the width of the norm after the matrix",
        hint="Use the strategy of the weights.",
    )

    def __init__(
        self,
        d_in: int,
        d_out: int,
        *,
        scale_in: ScaleVector | None = None,
        scale_out: ScaleVector | None = None,
        norm_width: int | None = None,
        eps: float = 1e-5,
        batch_dims: Sequence[int] = (),
        role: MatrixRole = "matrix",
    ):
        super().__init__()
        assert norm_width is None or d_out % norm_width == 0
        self.d_in = d_in
        self.d_out = d_out
        self.norm_width = norm_width
        self.eps = eps
        self.batch_dims = tuple(batch_dims)
        self.role = role
        self.weight = nn.Parameter(torch.empty(*self.batch_dims, d_out, d_in))
        self.scale_in = scale_in
        self.scale_out = scale_out
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the weight as nn.Linear does, uniform in ±1/sqrt(d_in)."""
        bound = self.d_in**-0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(
        self,
        xhat: Float[Tensor, "*tokens {self.d_in}"],
        rows: Rows | None = None,
    ) -> Float[Tensor, "*tokens {self.d_out}"]:
        """(..., d_in) -> (..., d_out).

        Args:
            xhat: the normalized input; (R, d_in), sorted by expert, if there is one matrix per
                expert
            rows: expert of each row, if there is one matrix per expert
        """
        return self.output(xhat, rows).finish()

    def output(self, xhat: Tensor, rows: Rows | None = None) -> Output:
        """Return the result of `forward` before the norm; same arguments."""
        gamma_in = gamma_of(self.scale_in)
        gamma_out = gamma_of(self.scale_out)
        if self.norm_width is None:
            product = self._product(xhat, gamma_in, gamma_out, rows)
            return Output(product, None, self.eps, None)

        # the norm stands between W and gamma_out
        product = self._product(xhat, gamma_in, None, rows)
        if gamma_out is not None and rows is not None:
            gamma_out = gamma_out[rows.expert]  # (E, d_out) -> (R, d_out)
        return Output(product, self.norm_width, self.eps, gamma_out)

    def _product(
        self, xhat: Tensor, gamma_in: Tensor | None, gamma_out: Tensor | None, rows: Rows | None
    ) -> Tensor:
        if rows is None:
            assert not self.batch_dims
            return scaled_product(xhat, self.weight, gamma_in, gamma_out)
        assert self.batch_dims
        return grouped_product(xhat, self.weight, gamma_in, gamma_out, rows)

    def extra_repr(self) -> str:
        """Show the widths in the printed module."""
        widths = [*map(str, self.batch_dims), f"{self.d_in} -> {self.d_out}"]
        norm = "" if self.norm_width is None else f", norm_width={self.norm_width}"
        return " x ".join(widths) + norm


class BranchGroup(nn.Module):
    """A norm and its branches: {q, k, v}, {gate, up}, {router, experts, ...} or {lm_head}.

    Call `forward`, `outputs`, or `norm` followed by `branch` (if branches read different tokens).
    Sharing, folding and fusion are decided in this class alone.

    Args:
        site: name of the norm's site, for instance 'attn_norm'
        norm: the norm; it owns the shared scale_in, if there is one
        branches: site name -> branch, in the order of the outputs
    """

    def __init__(self, site: str, norm: RMSNorm, branches: dict[str, ScaledLinear]):
        super().__init__()
        self.site = site
        self.norm = norm
        self.names = tuple(branches)
        for name, branch in branches.items():
            self.add_module(name, branch)

    def branches(self) -> Iterator[tuple[str, ScaledLinear]]:
        """Yield (site, branch) in the order of the outputs."""
        for name in self.names:
            branch = getattr(self, name)
            assert isinstance(branch, ScaledLinear)
            yield name, branch

    def vectors(self, name: str) -> tuple[ScaleVector | None, ScaleVector | None]:
        """Return the (input-side, output-side) scale vector of branch `name`, shared or own."""
        branch: ScaledLinear = getattr(self, name)
        scale_in = self.norm.scale if branch.scale_in is None else branch.scale_in
        return scale_in, branch.scale_out

    def forward(self, x: Float[Tensor, "*tokens d_in"]) -> tuple[Float[Tensor, "*tokens _"], ...]:
        """(B, T, d_in) -> one (B, T, d_out) per branch."""
        xhat = self.norm(x)
        return tuple(self.branch(name, xhat) for name in self.names)

    def outputs(self, x: Tensor) -> tuple[Output, ...]:
        """Return the results of `forward` before the norms, so that a caller can fuse the norm."""
        xhat = self.norm(x)
        return tuple(branch.output(xhat) for _, branch in self.branches())

    def branch(
        self, name: str, xhat: Float[Tensor, "*tokens d_in"], rows: Rows | None = None
    ) -> Float[Tensor, "*tokens d_out"]:
        """Apply one branch to the normalized input (see `ScaledLinear.forward`)."""
        return getattr(self, name)(xhat, rows)


class ScaledMatrix(NamedTuple):
    """A matrix with its scale vectors, its own or shared with other branches of its norm."""

    path: str
    linear: ScaledLinear
    vectors: tuple[ScaleVector | None, ScaleVector | None]


def scaled_linears(model: nn.Module) -> Iterator[ScaledMatrix]:
    """Yield (path, matrix, (scale_in, scale_out)) of every branch and of other scaled matrices."""
    vectors_of_branch = {}
    for group in _branch_groups(model):
        for name, branch in group.branches():
            vectors_of_branch[branch] = group.vectors(name)

    for path, module in model.named_modules():
        if not isinstance(module, ScaledLinear):
            continue
        if module in vectors_of_branch:
            yield ScaledMatrix(path, module, vectors_of_branch[module])
        elif module.scale_in is not None or module.scale_out is not None:
            yield ScaledMatrix(path, module, (module.scale_in, module.scale_out))


def output_norms(model: nn.Module) -> Iterator[tuple[str, RMSNorm]]:
    """Yield (path, norm) of the scaled norms outside branch groups: Q/K-norm, Post-Norm."""
    input_norms = {group.norm for group in _branch_groups(model)}
    for path, module in model.named_modules():
        if not isinstance(module, RMSNorm) or module in input_norms:
            continue
        if module.scale is not None:
            yield path, module


def _branch_groups(model: nn.Module) -> list[BranchGroup]:
    return [module for module in model.modules() if isinstance(module, BranchGroup)]
