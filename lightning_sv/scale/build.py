"""Norms and branches of a model's sites, built from a strategy."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from torch import nn

from lightning_sv.errors import ConfigError, expect, expect_known
from lightning_sv.scale.branch import BranchGroup, MatrixRole, ScaledLinear
from lightning_sv.scale.norm import RMSNorm
from lightning_sv.scale.strategy import FOLDED, PLACEMENTS, Placement, ScaleStrategy, branch_placement
from lightning_sv.scale.vector import ROLES, HeadShared, Role, ScaleVector


@dataclass(frozen=True)
class ScaleOptions:
    """Options that the paper leaves open; the label lists those that differ from their defaults.

    Attributes:
        placement_at: placement of single branches, site -> token, for instance {lm_head: dp}, or {router: bp} for
            router logits without an output-side vector. Tokens are those of strategies, plus `np` and `anp`, the
            results of folding `dnp`. o_proj and down_proj (shared_down_proj, expert_down_proj) have scale vectors
            only if they are listed here, with bp, ap or dp
        role_at: role of single vectors, 'site.scale_in' or 'site.scale_out' -> 'input' | 'output',
            for instance {v_proj.scale_out: input} to decay the output side of v under `iwd`
        share_scale_out: share one output-side vector between the branches of a norm that have equal widths
        freeze_input_beta: do not train beta of scale_in if the branch's output is normalized; the loss does not
            depend on it, but Adam changes it
        share_heads: branches whose heads share one output-side vector of head width, for instance [q_proj, k_proj];
            with `dnp` for them, this is the Q/K-norm of Qwen 3, and Qwen 3's code can run the model
        initial_gamma_out: output-side gamma at initialization; the beta of `or`, exp(beta) of `er`
    """

    placement_at: dict[str, str] = field(default_factory=dict)
    role_at: dict[str, str] = field(default_factory=dict)
    share_scale_out: bool = False
    freeze_input_beta: bool = False
    share_heads: list[str] = field(default_factory=list)
    initial_gamma_out: float = 1.0

    def __post_init__(self) -> None:
        gamma = self.initial_gamma_out
        expect(0 < gamma <= 1e12, "scale_options.initial_gamma_out", gamma, "a number above 0, up to 1e12.")
        for site, token in self.placement_at.items():
            if ":" not in token:
                expect_known(f"scale_options.placement_at.{site}", token, PLACEMENTS | FOLDED)
        for key, role in self.role_at.items():
            fits = role in ROLES and key.rpartition(".")[2] in ("scale_in", "scale_out", "scale")
            wanted = "SITE.scale_in or SITE.scale_out with the role 'input' or 'output'."
            expect(fits, "scale_options.role_at", f"{key!r}: {role!r}", wanted)

    def label(self) -> str:
        """Return '' or '[key=value,...]' with the options that differ from their defaults."""
        parts = [f"{site}={token}" for site, token in sorted(self.placement_at.items())]
        parts += [f"{key}={role}" for key, role in sorted(self.role_at.items())]
        parts += [f.name for f in fields(self) if getattr(self, f.name) is True]
        parts += [f"share_heads={'+'.join(sorted(set(self.share_heads)))}"] if self.share_heads else []
        parts += [f"initial_gamma_out={self.initial_gamma_out:g}"] if self.initial_gamma_out != 1 else []
        return f"[{','.join(parts)}]" if parts else ""


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


class ScaleBuilder:
    """Build the norm and branches of each site of a model, according to strategy and options.

    Args:
        strategy: strategy of the model
        options: exceptions for single sites
        eps: epsilon of every norm
    """

    def __init__(self, strategy: str | ScaleStrategy, options: ScaleOptions | None = None, eps: float = 1e-5):
        self.strategy, self.options, self.eps = ScaleStrategy.parse(strategy), options or ScaleOptions(), eps
        self._sites: set[str] = set()
        self._vectors: set[str] = set()
        self._roles: set[Role] = set()
        self._with_heads: set[str] = set()  # branches whose heads can share an output-side vector
        self._shared_groups = False
        self._used: set[str] = set()  # options without sites that change this model

    def group(
        self, site: str, d_in: int, branches: Mapping[str, Branch], kind: type[BranchGroup] = BranchGroup
    ) -> BranchGroup:
        """Build a norm of width d_in and its branches as a group of class `kind`."""
        for name, branch in branches.items():
            for key, part in {"norm_width": branch.norm_width, "n_head": branch.n_head}.items():
                divides = part is None or (part > 0 and branch.d_out % part == 0)
                expect(divides, f"{key} of {name}", part, f"a divisor of its d_out, {branch.d_out}, or None.")
        rows = {name: self._row(name) for name in branches}
        own_in = self.strategy.per_branch
        shared_out = self._shared_out(site, branches, rows)
        owned = {name for names in shared_out for name in names}
        has_in = {row.scale_in for row in rows.values()}
        if not own_in and len(has_in) == 2:
            found = f"gives only some branches of {site} an input-side scale vector"
            raise ConfigError(f"scale_options.placement_at {found}, but the strategy shares one; add 'hg' to it.")
        self._shared_groups |= len(branches) > 1 and True in has_in
        norm_scale = self._vector(site, "scale", d_in, "input") if not own_in and True in has_in else None
        built = {}
        for name, branch in branches.items():
            row = rows[name]
            if name in self.options.placement_at and row.norm_out and branch.norm_width is None:
                raise ConfigError(f"scale_options.placement_at normalizes {name}, which is never normalized; use dp.")
            if row.scale_out and branch.n_head is not None:
                self._with_heads.add(name)
            norm_width = branch.norm_width if row.norm_out else None
            own = own_in and row.scale_in
            scale_in = self._vector(name, "scale_in", d_in, "input", branch.batch_dims) if own else None
            scale_out = self._out(name, name, branch) if row.scale_out and name not in owned else None
            built[name] = ScaledLinear(
                d_in, branch.d_out, scale_in=scale_in, scale_out=scale_out, norm_width=norm_width, eps=self.eps,
                batch_dims=branch.batch_dims, role=branch.role,
            )  # fmt: skip
        if self.options.freeze_input_beta:
            normed = [branch.scale_in for branch in built.values() if branch.norm_width is not None]
            for vector in [*normed, norm_scale] if len(normed) == len(built) else normed:
                if vector is not None and vector.magnitude is not None:
                    vector.magnitude.requires_grad_(False)
                    self._used.add("freeze_input_beta")
        return kind(site, RMSNorm(d_in, self.eps, norm_scale), built, shared_out)

    def linear(self, site: str, d_in: int, d_out: int, batch_dims: tuple[int, ...] = ()) -> nn.Linear | ScaledLinear:
        """Build a matrix without a norm (o_proj, down_proj), scaled only if `placement_at` names it.

        Raises:
            ConfigError: the placement contains a normalization
        """
        self._sites.add(site)
        row = branch_placement(self.options.placement_at.get(site, "nop"))
        wanted = "bp, ap or dp. To normalize the block's output, use model.backbone.post_norm."
        expect(not row.norm_out, f"scale_options.placement_at.{site}", self.options.placement_at.get(site), wanted)
        if not batch_dims and not (row.scale_in or row.scale_out):
            return nn.Linear(d_in, d_out, bias=False)
        scale_in = self._vector(site, "scale_in", d_in, "input", batch_dims) if row.scale_in else None
        scale_out = self._vector(site, "scale_out", d_out, "output", batch_dims) if row.scale_out else None
        return ScaledLinear(d_in, d_out, scale_in=scale_in, scale_out=scale_out, batch_dims=batch_dims)

    def norm(self, site: str, d: int) -> RMSNorm:
        """Build a norm without branches (Q/K-norm, Post-Norm), with the role of an Output-Norm.

        It has a scale vector if the strategy has any (paper, Section 2.2).
        """
        row = self.strategy.placement_row
        has = row.scale_in or row.scale_out
        return RMSNorm(d, self.eps, self._vector(site, "scale", d, "output") if has else None)

    def _shared_out(
        self, site: str, branches: Mapping[str, Branch], rows: Mapping[str, Placement]
    ) -> dict[tuple[str, ...], ScaleVector]:
        groups: dict[tuple[int, tuple[int, ...], int | None], list[str]] = {}
        for name, branch in branches.items():
            if self.options.share_scale_out and rows[name].scale_out:
                key = (branch.d_out, branch.batch_dims, name in self.options.share_heads and branch.n_head)
                groups.setdefault(key, []).append(name)
        several = [names for names in groups.values() if len(names) > 1]
        self._used |= {"share_scale_out"} if several else set()
        return {tuple(names): self._out(site, names[0], branches[names[0]]) for names in several}

    def _out(self, site: str, name: str, branch: Branch) -> ScaleVector:
        if branch.n_head is None or name not in self.options.share_heads:
            return self._vector(site, "scale_out", branch.d_out, "output", branch.batch_dims)
        g = self._vector(site, "scale_out", branch.d_out // branch.n_head, "output", branch.batch_dims)
        return HeadShared(g, branch.n_head)

    def finish(self) -> ScaleStrategy:
        """Check that every option changes the model; return the model's canonical strategy.

        Raises:
            ConfigError: a key of the options names a site that the model does not have, or an option has no effect

        Warns:
            UserWarning: a simpler strategy gives the same model (`hg+ap` is `ap`).
        """
        for option, known, kind in (
            ("placement_at", self._sites, "branch"),
            ("share_heads", self._with_heads, "branch with heads and an output-side scale vector"),
            ("role_at", self._vectors, "scale vector"),
        ):
            for key in getattr(self.options, option):
                if key not in known:
                    hint = f"This model has: {' '.join(sorted(known)) or 'none'}."
                    raise ConfigError(f"scale_options.{option} names {key!r}; expected a {kind}. {hint}")
        for option, wanted in (
            ("share_scale_out", "False, because no norm has several output-side scale vectors of equal width."),
            ("freeze_input_beta", "False, because no input-side scale vector with a beta has a normalized output."),
            ("initial_gamma_out", "1, because no branch has an output-side scale vector."),
        ):
            value = getattr(self.options, option)
            idle = value != getattr(ScaleOptions, option) and option not in self._used
            expect(not idle, f"scale_options.{option}", value, wanted)
        canonical = self.strategy.canonical(frozenset(self._roles), shared_groups=self._shared_groups)
        if canonical != self.strategy:
            same = f"scale strategy {str(self.strategy)!r} is the same model as {str(canonical)!r}."
            warnings.warn(same, stacklevel=3)
        return canonical

    def _row(self, site: str) -> Placement:
        self._sites.add(site)
        token = self.options.placement_at.get(site)
        return self.strategy.placement_row if token is None else branch_placement(token)

    def _vector(self, site: str, side: str, d: int, role: Role, batch_dims: tuple[int, ...] = ()) -> ScaleVector:
        key = f"{site}.{side}"
        role = "input" if self.options.role_at.get(key, role) == "input" else "output"
        self._vectors.add(key)
        self._roles.add(role)
        vector = self.strategy.vector(d, role, batch_dims)
        if side == "scale_out" and self.options.initial_gamma_out != 1:
            self._used.add("initial_gamma_out")
            vector.initial = self.options.initial_gamma_out
            if not next(vector.parameters()).is_meta:  # else it is reset when it gets memory
                vector.reset_parameters()
        return vector
