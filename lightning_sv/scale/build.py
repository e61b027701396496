"""Norms and branches of a model's sites, built from a strategy.

A model names its sites and their widths, and never looks at the strategy:

    build = ScaleBuilder("hg+dnp", options)
    qkv = build.group("attn_norm", d, {"q_proj": Branch(...), ...})    a norm and its branches
    o_proj = build.linear("o_proj", d, d)                              a matrix without a norm
    q_norm = build.norm("q_norm", d_head)                              a norm without branches
    build.finish()

A site is a matrix or a norm of the model. Each call first makes one `LinearPlan` per matrix, and
then builds modules from the plans. The builder keeps plans and vectors: in `finish` they show which
names the options can use, and which options changed nothing.
"""

import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import cast

from torch import nn

from lightning_sv.errors import ConfigError, expect
from lightning_sv.scale.branch import Branch, BranchGroup, ScaledLinear
from lightning_sv.scale.linear_plan import LinearPlan
from lightning_sv.scale.norm import RMSNorm
from lightning_sv.scale.options import ScaleOptions
from lightning_sv.scale.strategy import Placement, ScaleStrategy, branch_placement
from lightning_sv.scale.vector import HeadShared, Role, ScaleVector


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
        self._plans: list[LinearPlan] = []
        self._vectors: list[tuple[str, ScaleVector]] = []  # 'site.side', vector

    def group(
        self,
        site: str,
        d_in: int,
        branches: Mapping[str, Branch],
        kind: type[BranchGroup] = BranchGroup,
    ) -> BranchGroup:
        """Build a norm of width d_in and its branches as a group of class `kind`."""
        plans = self._plan_group(site, d_in, branches)
        self._plans += plans

        # vectors that several branches share belong to the norm and the group
        norm_scale = None
        if not self.strategy.per_branch and plans_with_scale_in(plans):
            norm_scale = self._vector(f"{site}.scale", d_in, "input")
        shared_out: dict[tuple[str, ...], ScaleVector] = {}
        for plan in plans:
            if plan.is_first_sharer:
                shared_out[plan.sharers] = self._scale_out(site, plan)

        linears = {plan.name: self._scaled_linear(plan) for plan in plans}
        if self.options.freeze_input_beta:
            freeze_input_betas(linears.values(), norm_scale)
        return kind(site, RMSNorm(d_in, self.eps, norm_scale), linears, shared_out)

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
            expected = (
                "bp, ap or dp. To normalize the block's output, use model.backbone.post_norm."
            )
            raise ConfigError(f"scale_options.placement_at.{site} is {token}; expected {expected}")

        plan = LinearPlan(
            name=site,
            d_in=d_in,
            branch=Branch(d_out, dnp_width=None, batch_dims=batch_dims),
            placement=placement,
            owns_scale_in=placement.scale_in,
        )
        self._plans.append(plan)
        has_vectors = placement.scale_in or placement.scale_out
        if has_vectors or batch_dims:
            return self._scaled_linear(plan)
        return nn.Linear(d_in, d_out, bias=False)

    def norm(self, site: str, d: int) -> RMSNorm:
        """Build a norm without branches (Q/K-norm, Post-Norm), with the role of an Output-Norm.

        It has a scale vector if the strategy has any (paper, Section 2.2).
        """
        placement = self.strategy.placement_row
        if placement.scale_in or placement.scale_out:
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
        self._check_names()
        self._check_effects()

        roles = frozenset(vector.role for _, vector in self._vectors)
        shared_groups = any(plan.has_siblings for plan in plans_with_scale_in(self._plans))
        canonical = self.strategy.canonical(roles, shared_groups=shared_groups)
        if canonical != self.strategy:
            same = f"scale strategy {str(self.strategy)!r} is the same model as {str(canonical)!r}."
            warnings.warn(same, stacklevel=3)
        return canonical

    def _plan_group(self, norm: str, d_in: int, branches: Mapping[str, Branch]) -> list[LinearPlan]:
        """Return the plans of a group, in the order of its branches."""
        plans = []
        for name, branch in branches.items():
            branch.check(name)
            placement = self._placement(name)
            plan = LinearPlan(
                name=name,
                d_in=d_in,
                branch=branch,
                placement=placement,
                owns_scale_in=self.strategy.per_branch and placement.scale_in,
                has_siblings=len(branches) > 1,
                shares_heads=name in self.options.share_heads,
            )
            plans.append(plan)
        self._check_placements(norm, plans)
        if self.options.share_scale_out:
            return sharing_scale_out(plans)
        return plans

    def _placement(self, branch: str) -> Placement:
        token = self.options.placement_at.get(branch)
        if token is None:
            return self.strategy.placement_row
        return branch_placement(token)

    def _check_placements(self, norm: str, plans: Sequence[LinearPlan]) -> None:
        """Raise ConfigError if the placements of single branches do not fit the group."""
        n_with_scale_in = len(plans_with_scale_in(plans))
        if not self.strategy.per_branch and 0 < n_with_scale_in < len(plans):
            found = f"gives only some branches of {norm} an input-side scale vector"
            hint = "but the strategy shares one; add 'hg' to it."
            raise ConfigError(f"scale_options.placement_at {found}, {hint}")
        for plan in plans:
            is_named = plan.name in self.options.placement_at
            if is_named and plan.placement.norm_out and plan.branch.dnp_width is None:
                found = f"normalizes {plan.name}, which is never normalized"
                raise ConfigError(f"scale_options.placement_at {found}; use dp.")

    def _scaled_linear(self, plan: LinearPlan) -> ScaledLinear:
        branch = plan.branch
        scale_in: ScaleVector | None = None
        if plan.owns_scale_in:
            scale_in = self._vector(f"{plan.name}.scale_in", plan.d_in, "input", branch.batch_dims)
        scale_out: ScaleVector | None = None
        if plan.owns_scale_out:
            scale_out = self._scale_out(plan.name, plan)
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

    def _scale_out(self, owner: str, plan: LinearPlan) -> ScaleVector:
        """Build an output-side vector, owned by the branch, or by the norm if several share it."""
        branch = plan.branch
        key = f"{owner}.scale_out"
        if not plan.shares_heads or branch.n_head is None:
            return self._scale_out_vector(key, branch.d_out, branch.batch_dims)
        d_head = branch.d_out // branch.n_head
        return HeadShared(self._scale_out_vector(key, d_head, branch.batch_dims), branch.n_head)

    def _scale_out_vector(self, key: str, d: int, batch_dims: tuple[int, ...]) -> ScaleVector:
        vector = self._vector(key, d, "output", batch_dims)
        if self.options.initial_gamma_out != 1:
            vector.initial = self.options.initial_gamma_out
            is_meta = next(vector.parameters()).is_meta
            if not is_meta:  # else it is reset when it gets memory
                vector.reset_parameters()
        return vector

    def _vector(
        self, key: str, d: int, role: Role, batch_dims: tuple[int, ...] = ()
    ) -> ScaleVector:
        """Build and record the vector 'site.side', with the role that the options give it."""
        role = cast(Role, self.options.role_at.get(key, role))  # checked by `ScaleOptions`
        vector = self.strategy.vector_class(d, role, batch_dims)
        self._vectors.append((key, vector))
        return vector

    def _check_names(self) -> None:
        """Raise ConfigError if an option names a site that this model does not have."""
        matrices = {plan.name for plan in self._plans}
        with_heads = {plan.name for plan in self._plans if plan.can_share_heads}
        vectors = {key for key, _ in self._vectors}
        expected = "branch with heads and an output-side scale vector"
        self._expect_names("placement_at", matrices, "branch")
        self._expect_names("share_heads", with_heads, expected)
        self._expect_names("role_at", vectors, "scale vector")

    def _expect_names(self, option: str, known: Collection[str], expected: str) -> None:
        unknown = [name for name in getattr(self.options, option) if name not in known]
        if unknown:
            hint = f"This model has: {' '.join(sorted(known)) or 'none'}."
            found = f"scale_options.{option} names {unknown[0]!r}"
            raise ConfigError(f"{found}; expected a {expected}. {hint}")

    def _check_effects(self) -> None:
        """Raise ConfigError if an option is set and changes nothing."""
        self._expect_effect(
            "share_scale_out",
            any(plan.has_shared_scale_out for plan in self._plans),
            "False, because no norm has several output-side scale vectors of equal width.",
        )
        self._expect_effect(
            "freeze_input_beta",
            any(has_frozen_beta(vector) for _, vector in self._vectors),
            "False, because no input-side scale vector with a beta has a normalized output.",
        )
        self._expect_effect(
            "initial_gamma_out",
            any(key.endswith(".scale_out") for key, _ in self._vectors),
            "1, because no branch has an output-side scale vector.",
        )

    def _expect_effect(self, option: str, has_effect: bool, expected: str) -> None:
        value = getattr(self.options, option)
        is_set = value != getattr(ScaleOptions, option)
        expect(has_effect or not is_set, f"scale_options.{option}", value, expected)


def plans_with_scale_in(plans: Iterable[LinearPlan]) -> list[LinearPlan]:
    """Return the plans whose placement has an input-side vector, their own or the norm's."""
    return [plan for plan in plans if plan.placement.scale_in]


def sharing_scale_out(plans: Iterable[LinearPlan]) -> list[LinearPlan]:
    """Return the plans, which share one output-side vector per shape."""
    names_of_shape: dict[object, list[str]] = defaultdict(list)
    for plan in plans:
        if plan.placement.scale_out:
            names_of_shape[plan.scale_out_shape].append(plan.name)

    sharing = []
    for plan in plans:
        if plan.placement.scale_out:
            plan = replace(plan, sharers=tuple(names_of_shape[plan.scale_out_shape]))
        sharing.append(plan)
    return sharing


def freeze_input_betas(linears: Collection[ScaledLinear], norm_scale: ScaleVector | None) -> None:
    """Stop training the input-side betas on which no result depends, because a norm follows."""
    normalized = [linear for linear in linears if linear.norm_width is not None]
    for linear in normalized:
        _freeze_beta(linear.scale_in)
    if len(normalized) == len(linears):
        _freeze_beta(norm_scale)


def _freeze_beta(vector: ScaleVector | None) -> None:
    if vector is not None and vector.magnitude is not None:
        vector.magnitude.requires_grad_(False)


def has_frozen_beta(vector: ScaleVector) -> bool:
    """Return True if the magnitude of a vector is not trained."""
    return vector.magnitude is not None and not vector.magnitude.requires_grad
