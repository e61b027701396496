"""Linear branches of a normalized input, with their scale vectors.

    xhat = Norm(x)  --[scale_in]-->  W  --[Norm]-->  [scale_out]-->  y          [..] optional

Every strategy of the paper is a choice of the optional parts (Sections 3.1 and 3.2). Shapes:
B batch, T positions, d_in width of the norm, d_out width of a branch.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from lightning_sv.errors import expect
from lightning_sv.scale.fold import scaled_product
from lightning_sv.scale.grouped import Rows, grouped_product
from lightning_sv.scale.norm import RMSNorm, normalize
from lightning_sv.scale.shapes import Float
from lightning_sv.scale.state_record import RecordedModule
from lightning_sv.scale.vector import ScaleVector

#: Role of a matrix in the model, read by the optimizer. matrix: inside a block; router: scores experts; head: logits.
MatrixRole = Literal["matrix", "router", "head"]


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
    def one_norm(self) -> bool:
        """True if one norm covers all channels."""
        return self.norm_width == self.product.shape[-1]

    def finish(self) -> Tensor:
        """Apply the norm and the scale, (..., d_out)."""
        if self.norm_width is None:
            return self.product
        if self.one_norm:
            return normalize(self.product, self.eps, self.gamma)
        groups = (-1, self.norm_width)
        gamma = None if self.gamma is None else self.gamma.unflatten(-1, groups)
        return normalize(self.product.unflatten(-1, groups), self.eps, gamma).flatten(-2)


class ScaledLinear(RecordedModule):
    """y = scale_out * Norm(W (scale_in * xhat)), no bias; each part but W optional.

    Not a subclass of nn.Linear: tools that replace Linears by type would silently drop the scales.

    Args:
        d_in: width of the input
        d_out: width of the output
        scale_in: the branch's own input-side vector, width d_in
        scale_out: the output-side vector, width d_out
        norm_width: number of output channels normalized together: the head dimension for q, k, v, otherwise
            d_out; None for no normalization
        eps: epsilon of the normalization
        batch_dims: leading axes of weight and vectors, (n_expert,) for one matrix per expert
        role: role of the matrix in the model
    """

    recorded = "norm_width", "the width of the norm after the matrix", "Use the strategy of the weights."

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
        self.d_in, self.d_out, self.norm_width, self.eps = d_in, d_out, norm_width, eps
        self.batch_dims, self.role = tuple(batch_dims), role
        self.weight = nn.Parameter(torch.empty(*self.batch_dims, d_out, d_in))
        self.scale_in, self.scale_out = scale_in, scale_out
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the weight like nn.Linear: uniform in ±1/sqrt(d_in). Backbone overwrites it."""
        bound = self.d_in**-0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(
        self,
        xhat: Float[Tensor, "*tokens {self.d_in}"],
        gamma_out: Float[Tensor, "*batch_dims {self.d_out}"] | None = None,
        rows: Rows | None = None,
    ) -> Float[Tensor, "*tokens {self.d_out}"]:
        """(..., d_in) -> (..., d_out).

        Args:
            xhat: the normalized input; (R, d_in), sorted by expert, if there is one matrix per expert
            gamma_out: output-side gamma owned by the group (see `BranchGroup`), used if the branch has none
            rows: expert of each row, if there is one matrix per expert
        """
        return self.output(xhat, gamma_out, rows).finish()

    def output(self, xhat: Tensor, gamma_out: Tensor | None = None, rows: Rows | None = None) -> Output:
        """Return the result of `forward` before the norm; same arguments."""
        assert (rows is None) == (not self.batch_dims)
        gamma_in = None if self.scale_in is None else self.scale_in()
        if self.scale_out is not None:
            gamma_out = self.scale_out()
        factors = self.weight, gamma_in, gamma_out if self.norm_width is None else None
        product = scaled_product(xhat, *factors) if rows is None else grouped_product(xhat, *factors, rows)
        if self.norm_width is None:
            return Output(product, None, self.eps, None)
        if gamma_out is not None and rows is not None:
            gamma_out = gamma_out[rows.expert]  # (R, d_out)
        return Output(product, self.norm_width, self.eps, gamma_out)

    def extra_repr(self) -> str:
        """Show the widths in the printed module."""
        batch = "".join(f"{n} x " for n in self.batch_dims)
        norm = "" if self.norm_width is None else f", norm_width={self.norm_width}"
        return f"{batch}{self.d_in} -> {self.d_out}{norm}"


def scaled_linears(
    model: nn.Module,
) -> Iterator[tuple[str, ScaledLinear, tuple[ScaleVector | None, ScaleVector | None]]]:
    """Yield (path, matrix, (scale_in, scale_out)) of every branch and of other scaled matrices."""
    grouped: set[int] = set()
    for path, module in model.named_modules():
        if isinstance(module, BranchGroup):
            for name, branch in module.branches():
                grouped.add(id(branch))
                yield f"{path}.{name}" if path else name, branch, module.vectors(name)
        elif isinstance(module, ScaledLinear) and id(module) not in grouped:
            vectors = module.scale_in, module.scale_out
            if vectors != (None, None):
                yield path, module, vectors


def output_norms(model: nn.Module) -> Iterator[tuple[str, RMSNorm]]:
    """Yield (path, norm) of the scaled norms outside branch groups: Q/K-norm, Post-Norm."""
    fed = {id(module.norm) for module in model.modules() if isinstance(module, BranchGroup)}
    for path, module in model.named_modules():
        if isinstance(module, RMSNorm) and module.scale is not None and id(module) not in fed:
            yield path, module


class BranchGroup(nn.Module):
    """A norm and its branches: {q, k, v}, {gate, up}, {router, experts, ...} or {lm_head}.

    Call `forward`, `outputs`, or `norm` followed by `branch` (if branches read different tokens). Sharing, folding
    and fusion are decided in this class alone.

    Args:
        site: name of the norm's site, for instance 'attn_norm'
        norm: the norm; it owns the shared scale_in, if there is one
        branches: site name -> branch, in the order of the outputs
        scale_out: shared output-side vectors (`share_scale_out`), keyed by the names of their branches
    """

    def __init__(
        self,
        site: str,
        norm: RMSNorm,
        branches: dict[str, ScaledLinear],
        scale_out: Mapping[tuple[str, ...], ScaleVector] | None = None,
    ):
        super().__init__()
        self.site = site
        self.norm = norm
        self.scale_out = nn.ModuleDict({"_".join(names): v for names, v in (scale_out or {}).items()})
        self._owner = {name: "_".join(names) for names in scale_out or {} for name in names}
        self.names = tuple(branches)
        for name, branch in branches.items():
            free = name.isidentifier() and not hasattr(self, name)
            expect(free, f"a branch of {site}", repr(name), "an identifier other than BranchGroup's attributes.")
            self.add_module(name, branch)

    def branches(self) -> Iterator[tuple[str, ScaledLinear]]:
        """Yield (site, branch) in the order of the outputs."""
        for name in self.names:
            branch = getattr(self, name)
            assert isinstance(branch, ScaledLinear)
            yield name, branch

    def gammas(self, name: str) -> tuple[Tensor | None, Tensor | None]:
        """Return the (input-side, output-side) gamma of branch `name`, shared or own."""
        scale_in, scale_out = self.vectors(name)
        return None if scale_in is None else scale_in(), None if scale_out is None else scale_out()

    def vectors(self, name: str) -> tuple[ScaleVector | None, ScaleVector | None]:
        """Return the (input-side, output-side) scale vector of branch `name`, shared or own."""
        branch: ScaledLinear = getattr(self, name)
        return (
            self.norm.scale if branch.scale_in is None else branch.scale_in,
            self._shared_out(name) if branch.scale_out is None else branch.scale_out,
        )

    def _shared_out(self, name: str) -> ScaleVector | None:
        if name not in self._owner:
            return None
        vector = self.scale_out[self._owner[name]]
        assert isinstance(vector, ScaleVector)
        return vector

    def forward(self, x: Float[Tensor, "*tokens d_in"]) -> tuple[Float[Tensor, "*tokens _"], ...]:
        """(B, T, d_in) -> one (B, T, d_out) per branch."""
        xhat = self.norm(x)
        return tuple(self.branch(name, xhat) for name in self.names)

    def outputs(self, x: Tensor) -> tuple[Output, ...]:
        """Return the results of `forward` before the norms, so that a caller can fuse the norm."""
        xhat = self.norm(x)
        return tuple(getattr(self, name).output(xhat, self._gamma_out(name)) for name in self.names)

    def branch(
        self, name: str, xhat: Float[Tensor, "*tokens d_in"], rows: Rows | None = None
    ) -> Float[Tensor, "*tokens d_out"]:
        """Apply one branch to the normalized input (see `ScaledLinear.forward`)."""
        return getattr(self, name)(xhat, self._gamma_out(name), rows)

    def _gamma_out(self, name: str) -> Tensor | None:
        shared = self._shared_out(name)
        return None if shared is None else shared()
