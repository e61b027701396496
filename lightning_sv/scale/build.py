"""Norms and branches of a model's sites, built from a strategy.

A model names its sites and their widths, and never looks at the strategy:

    build = ScaleBuilder("hg+dnp", options)
    qkv = build.group("attn_norm", d, {"q_proj": Branch(...), ...})    a norm and its branches
    o_proj = build.linear("o_proj", d, d)                              a matrix without a norm
    q_norm = build.norm("q_norm", d_head)                              a norm without branches
    build.finish()

A site is a matrix or a norm of the model. `group` first makes one `LinearPlan` per matrix, and then
builds modules from the plans. The builder notes the names of matrices and vectors, and which
options changed something: `finish` refuses options with an unknown name or without effect.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from torch import nn

from lightning_sv.errors import ConfigError
from lightning_sv.scale.branch import Branch, BranchGroup, ScaledLinear
from lightning_sv.scale.norm import RMSNorm
from lightning_sv.scale.options import ScaleOptions
from lightning_sv.scale.strategy import Placement, ScaleStrategy, branch_placement
from lightning_sv.scale.vector import HeadShared, Role, ScaleVector

#: option -> its expected value in a model in which it changes nothing
WITHOUT_EFFECT = {
    "freeze_input_beta": (
        "False, because no input-side scale vector with a beta has a normalized output."
    ),
    "initial_gamma_out": "1, because no branch has an output-side scale vector.",
}


@dataclass(frozen=True)
class LinearPlan:
    """What strategy and options decide about one matrix, before its modules are built.

    Attributes:
        name: name of the matrix, for instance 'q_proj'
        d_in: width of its input
        branch: what the model requests
        placement: parts of the branch that are present
        owns_scale_in: False if the norm owns the input-side vector, or there is none
        n_sharing_heads: number of heads that share one output-side vector; None if heads share none
    """

    name: str
    d_in: int
    branch: Branch
    placement: Placement
    owns_scale_in: bool
    n_sharing_heads: int | None = None

    @property
    def norm_width(self) -> int | None:
        """Width of the norm after the matrix; None without one."""
        return self.branch.dnp_width if self.placement.norm_out else None


class ScaleBuilder:
    """Build the norm and branches of each site of a model, according to strategy and options.

    Args:
        strategy: strategy of the model
        options: exceptions for single sites
        eps: epsilon of every norm
    """

    def __init__(
        self, strategy: str | ScaleStrategy, options: ScaleOptions | None = None, eps: float = 1e-5
    ):
        self.strategy = ScaleStrategy.parse(strategy)
        self.options = ScaleOptions() if options is None else options
        self.eps = eps
        # what the model has, for `finish`
        self._matrices: set[str] = set()
        self._with_heads: set[str] = set()  # branches with heads and an output-side vector
        self._vectors: set[str] = set()  # 'site.side'
        self._roles: set[Role] = set()
        self._has_shared_groups = False  # several branches read one norm, with a scale_in
        self._effective: set[str] = set()  # keys of `WITHOUT_EFFECT` that changed something

    def group(
        self,
        site: str,
        d_in: int,
        branches: Mapping[str, Branch],
        kind: type[BranchGroup] = BranchGroup,
    ) -> BranchGroup:
        """Build a norm of width d_in and its branches as a group of class `kind`."""
        plans = [self._plan(name, d_in, branch) for name, branch in branches.items()]
        has_scale_in = any(plan.placement.scale_in for plan in plans)
        if has_scale_in and len(plans) > 1:
            self._has_shared_groups = True

        norm = RMSNorm(d_in, self.eps, self._shared_scale_in(site, plans))
        linears = {plan.name: self._scaled_linear(plan) for plan in plans}
        return kind(site, norm, linears)

    def linear(
        self, site: str, d_in: int, d_out: int, batch_dims: tuple[int, ...] = ()
    ) -> nn.Linear | ScaledLinear:
        """Build a matrix without a norm (o_proj, down_proj); scaled if `placement_at` names it.

        Raises:
            ConfigError: the placement contains a normalization
        """
        token = self.options.placement_at.get(site, "nop")
        placement = branch_placement(token)
        if placement.norm_out:
            found = f"scale_options.placement_at.{site} is {token}"
            hint = "To normalize the block's output, use model.backbone.post_norm."
            raise ConfigError(f"{found}; expected bp, ap or dp. {hint}")

        self._matrices.add(site)
        if not placement.has_vectors and not batch_dims:
            return nn.Linear(d_in, d_out, bias=False)
        branch = Branch(d_out, dnp_width=None, batch_dims=batch_dims)
        plan = LinearPlan(site, d_in, branch, placement, owns_scale_in=placement.scale_in)
        return self._scaled_linear(plan)

    def norm(self, site: str, d: int) -> RMSNorm:
        """Build a norm without branches (Q/K-norm, Post-Norm), with the role of an Output-Norm.

        It has a scale vector if the strategy has any (paper, Section 2.2).
        """
        if self.strategy.placement_row.has_vectors:
            return RMSNorm(d, self.eps, self._vector(f"{site}.scale", d, "output"))
        return RMSNorm(d, self.eps, None)

    def finish(self) -> ScaleStrategy:
        """Check that every option changes the model; return the model's canonical strategy.

        Raises:
            ConfigError: a key of the options names a site that the model does not have, or an
                option has no effect

        Warns:
            UserWarning: a simpler strategy gives the same model (`hg+ap` is `ap`).
        """
        expected_heads = "branch with heads and an output-side scale vector"
        self._check_names("placement_at", self._matrices, "branch")
        self._check_names("share_heads", self._with_heads, expected_heads)
        self._check_names("role_at", self._vectors, "scale vector")
        self._check_effects()

        canonical = self.strategy.canonical(
            frozenset(self._roles), shared_groups=self._has_shared_groups
        )
        if canonical != self.strategy:
            same = f"scale strategy {str(self.strategy)!r} is the same model as {str(canonical)!r}."
            warnings.warn(same, stacklevel=3)
        return canonical

    def _plan(self, name: str, d_in: int, branch: Branch) -> LinearPlan:
        branch.check(name)
        placement = self._placement(name, branch)
        self._matrices.add(name)
        if placement.scale_out and branch.n_head is not None:
            self._with_heads.add(name)

        shares_heads = name in self.options.share_heads
        return LinearPlan(
            name=name,
            d_in=d_in,
            branch=branch,
            placement=placement,
            owns_scale_in=self.strategy.per_branch and placement.scale_in,
            n_sharing_heads=branch.n_head if shares_heads else None,
        )

    def _placement(self, name: str, branch: Branch) -> Placement:
        """Return the placement of a branch, that of the strategy unless `placement_at` names it."""
        if name not in self.options.placement_at:
            return self.strategy.placement_row
        placement = branch_placement(self.options.placement_at[name])
        if placement.norm_out and branch.dnp_width is None:
            found = f"normalizes {name}, which is never normalized"
            raise ConfigError(f"scale_options.placement_at {found}; use dp.")
        return placement

    def _shared_scale_in(self, norm: str, plans: Sequence[LinearPlan]) -> ScaleVector | None:
        """Build the input-side vector that all branches share; None if each has its own, or none.

        Raises:
            ConfigError: the placements of single branches give it to a part of them
        """
        with_scale_in = [plan for plan in plans if plan.placement.scale_in]
        if self.strategy.per_branch or not with_scale_in:
            return None
        if len(with_scale_in) < len(plans):
            found = f"gives only some branches of {norm} an input-side scale vector"
            hint = "but the strategy shares one; add 'hg' to it."
            raise ConfigError(f"scale_options.placement_at {found}, {hint}")
        vector = self._vector(f"{norm}.scale", plans[0].d_in, "input")
        if all(plan.norm_width is not None for plan in plans):
            self._freeze_beta(vector)
        return vector

    def _scaled_linear(self, plan: LinearPlan) -> ScaledLinear:
        branch = plan.branch
        scale_in: ScaleVector | None = None
        if plan.owns_scale_in:
            scale_in = self._vector(f"{plan.name}.scale_in", plan.d_in, "input", branch.batch_dims)
            if plan.norm_width is not None:
                self._freeze_beta(scale_in)
        scale_out: ScaleVector | None = None
        if plan.placement.scale_out:
            scale_out = self._scale_out(plan)
        return ScaledLinear(
            plan.d_in,
            branch.d_out,
            scale_in=scale_in,
            scale_out=scale_out,
            norm_width=plan.norm_width,
            eps=self.eps,
            batch_dims=branch.batch_dims,
            role=branch.role,
        )

    def _scale_out(self, plan: LinearPlan) -> ScaleVector:
        """Build the output-side vector of a branch."""
        n_head = plan.n_sharing_heads
        width = plan.branch.d_out // (n_head or 1)
        vector = self._vector(f"{plan.name}.scale_out", width, "output", plan.branch.batch_dims)
        self._effective.add("initial_gamma_out")
        if self.options.initial_gamma_out != 1:
            vector.initial = self.options.initial_gamma_out
            is_meta = next(vector.parameters()).is_meta
            if not is_meta:  # else it is reset when it gets memory
                vector.reset_parameters()
        return vector if n_head is None else HeadShared(vector, n_head)

    def _freeze_beta(self, vector: ScaleVector) -> None:
        """Stop training the beta of an input-side vector that norms follow, if the options say so.

        No result depends on it, but Adam changes it.
        """
        beta = vector.magnitude
        if self.options.freeze_input_beta and beta is not None:
            beta.requires_grad_(False)
            self._effective.add("freeze_input_beta")

    def _vector(
        self, key: str, d: int, role: Role, batch_dims: tuple[int, ...] = ()
    ) -> ScaleVector:
        """Build and record the vector 'site.side', with the role that the options give it."""
        role = cast(Role, self.options.role_at.get(key, role))  # checked by `ScaleOptions`
        vector = self.strategy.vector_class(d, role, batch_dims)
        self._vectors.add(key)
        self._roles.add(role)
        return vector

    def _check_names(self, option: str, known: set[str], expected: str) -> None:
        """Raise ConfigError if an option names something that this model does not have."""
        for name in getattr(self.options, option):
            if name not in known:
                hint = f"This model has: {' '.join(sorted(known)) or 'none'}."
                found = f"scale_options.{option} names {name!r}"
                raise ConfigError(f"{found}; expected a {expected}. {hint}")

    def _check_effects(self) -> None:
        """Raise ConfigError if an option is set and changes nothing."""
        for option, expected in WITHOUT_EFFECT.items():
            value = getattr(self.options, option)
            is_set = value != getattr(ScaleOptions, option)
            if is_set and option not in self._effective:
                raise ConfigError(f"scale_options.{option} is {value}; expected {expected}")
