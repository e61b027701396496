"""What strategy and options decide about a matrix that a model requests."""

from dataclasses import dataclass

from lightning_sv.scale.branch import Branch
from lightning_sv.scale.strategy import Placement


@dataclass(frozen=True)
class LinearPlan:
    """What strategy and options decide about one matrix, before its modules are built.

    Attributes:
        name: name of the matrix, for instance 'q_proj'
        d_in: width of its input
        branch: what the model requests
        placement: parts of the branch that are present
        owns_scale_in: False if the norm owns the input-side vector, or there is none
        has_siblings: if True, other branches read the same norm
        shares_heads: if True, the heads share one output-side vector
        sharers: names of the branches that share its output-side vector, itself included; it does
            not share one if there are fewer than two
    """

    name: str
    d_in: int
    branch: Branch
    placement: Placement
    owns_scale_in: bool
    has_siblings: bool = False
    shares_heads: bool = False
    sharers: tuple[str, ...] = ()

    @property
    def norm_width(self) -> int | None:
        """Width of the norm after the matrix; None without one."""
        return self.branch.dnp_width if self.placement.norm_out else None

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
