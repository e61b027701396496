"""What a model requests for a matrix, and what strategy and options decide about it."""

from dataclasses import dataclass
from typing import NamedTuple

from lightning_sv.errors import expect
from lightning_sv.scale.branch import MatrixRole
from lightning_sv.scale.strategy import Placement


class Branch(NamedTuple):
    """Shape and role of a branch that a model requests.

    Attributes:
        d_out: width of the output
        norm_width: width normalized under `dnp`; None if the branch is never normalized
        batch_dims: leading axes, (n_expert,) for one matrix per expert
        role: role of the matrix in the model
        n_head: number of heads in the output; None if it has no heads
    """

    d_out: int
    norm_width: int | None
    batch_dims: tuple[int, ...] = ()
    role: MatrixRole = "matrix"
    n_head: int | None = None

    def check(self, name: str) -> None:
        """Raise ConfigError if a width does not divide the output."""
        self._check_divisor(f"norm_width of {name}", self.norm_width)
        self._check_divisor(f"n_head of {name}", self.n_head)

    def _check_divisor(self, key: str, divisor: int | None) -> None:
        if divisor is None:
            return
        divides = divisor > 0 and self.d_out % divisor == 0
        expect(divides, key, divisor, f"a divisor of its d_out, {self.d_out}, or None.")


@dataclass(frozen=True)
class LinearPlan:
    """What strategy and options decide about one matrix, before its modules are built.

    Attributes:
        name: name of the matrix, for instance 'q_proj'
        d_in: width of its input
        branch: what the model requests
        placement: parts of the branch that are present
        has_siblings: if True, other branches read the same norm
        owns_scale_in: False if the norm owns the input-side vector, or there is none
        shares_heads: if True, the heads share one output-side vector
        sharers: names of the branches that share its output-side vector, itself included
    """

    name: str
    d_in: int
    branch: Branch
    placement: Placement
    has_siblings: bool
    owns_scale_in: bool
    shares_heads: bool
    sharers: tuple[str, ...]

    @property
    def norm_width(self) -> int | None:
        """Width of the norm after the matrix; None without one."""
        return self.branch.norm_width if self.placement.norm_out else None

    @property
    def scale_out_shape(self) -> tuple[object, ...]:
        """Key that is equal for branches that can share an output-side vector."""
        n_head = self.branch.n_head if self.shares_heads else None
        return self.branch.d_out, self.branch.batch_dims, n_head

    @property
    def has_shared_scale_out(self) -> bool:
        """True if the output-side vector belongs to several branches."""
        return len(self.sharers) > 1

    @property
    def is_first_sharer(self) -> bool:
        """True for the first of the branches that share an output-side vector."""
        return self.has_shared_scale_out and self.sharers[0] == self.name

    @property
    def owns_scale_out(self) -> bool:
        """True if the branch has an output-side vector of its own."""
        return self.placement.scale_out and not self.has_shared_scale_out

    @property
    def can_share_heads(self) -> bool:
        """True if it has heads and an output-side vector."""
        return self.placement.scale_out and self.branch.n_head is not None
