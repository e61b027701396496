"""What a strategy changes at each norm of a model, decided before anything is changed.

A norm's vector gamma and the matrices behind it, under the placements of a strategy:

    kept       gamma * xhat -> W           the norm keeps it, in the strategy's parameterization
    moved      xhat -> W diag(gamma_in)    each matrix has a vector of its own with its value
    folded     xhat -> (W diag(gamma))     the strategy has no vectors before matrices
    constant   gamma * xhat -> W           the same, but matrices cannot absorb it
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum, auto

from torch import nn

from lightning_sv.errors import expect
from lightning_sv.interop.apply.matrices import SiteMatrix
from lightning_sv.interop.apply.site import Site
from lightning_sv.scale import ScaleStrategy


class Gamma(Enum):
    """What becomes of the vector of a norm."""

    ABSENT = auto()
    KEPT = auto()
    MOVED = auto()
    FOLDED = auto()
    CONSTANT = auto()


@dataclass(frozen=True)
class BranchPlan:
    """A matrix and its new vectors.

    Attributes:
        matrix: the matrix
        scale_in: whether it gets a vector before it
        scale_out: whether it gets one after it
        norm: whether its output is normalized
    """

    matrix: SiteMatrix
    scale_in: bool
    scale_out: bool
    norm: bool

    @property
    def is_plain(self) -> bool:
        """True if nothing is added."""
        return not (self.scale_in or self.scale_out or self.norm)


@dataclass(frozen=True)
class SitePlan:
    """A norm, what becomes of its vector, and the matrices behind it that change.

    Attributes:
        site: the norm
        gamma: what becomes of its vector
        branches: matrices with their new vectors
        shares: whether the matrices share one vector before them, which the norm does not have
    """

    site: Site
    gamma: Gamma
    branches: tuple[BranchPlan, ...]
    shares: bool


class Plan:
    """Changes of all sites of a model for a strategy.

    `dp_at` has the last parts of the names of matrices with `dp` instead of `dnp`.

    Attributes:
        sites: norms that change
        notes: (name, deviation from the strategy and its reason)

    Raises:
        ConfigError: `dp_at` names no matrix
    """

    def __init__(
        self,
        model: nn.Module,
        strategy: ScaleStrategy,
        dp_at: Collection[str],
        sites: list[Site],
    ):
        self.model = model
        self.strategy = strategy
        self.dp_at = dp_at
        self.row = strategy.placement_row
        self.named = dict(model.named_parameters())
        self._notes: dict[tuple[str, str], None] = {}  # ordered, and once each for tied matrices
        self._changed: set[str] = set()
        # a value stays linear in its vector through a norm by hand, up to matrices of that norm
        self._behind: set[str] = set()
        for site in sites:
            if site.role == "input":
                self._behind.update(site.readers)
        self._check_dp_at(sites)
        self.sites = list(self._plans(sites))

    @property
    def notes(self) -> list[tuple[str, str]]:
        """Pairs of a name and a deviation from the strategy with its reason."""
        return list(self._notes)

    def _check_dp_at(self, sites: list[Site]) -> None:
        words: dict[str, None] = {}
        if self.row.norm_out:
            for site in sites:
                words.update(dict.fromkeys(matrix.word for matrix in site.matrices))
        wanted = f"one of {' '.join(words)}." if words else "none without dnp."
        for word in self.dp_at:
            expect(word in words, "dp_at", repr(word), wanted)

    def _plans(self, sites: list[Site]) -> Iterator[SitePlan]:
        for site in sites:
            if site.origin in (0.0, 1.0):
                yield self._plan(site)
            else:
                why = "because its norm multiplies by neither w nor 1 + w"
                self._note(site.vector, f"unchanged, {why}")

    def _note(self, name: str, what: str) -> None:
        self._notes[name, what] = None

    def _plan(self, site: Site) -> SitePlan:
        self._note_matrices(site)
        gamma = self._gamma(site)
        is_new = gamma is Gamma.ABSENT and self.row.scale_in
        branches = self._branches(site, scale_in=is_new or gamma is Gamma.MOVED)
        shares = is_new and not self.strategy.per_branch
        return SitePlan(site, gamma, tuple(branches), shares=shares)

    def _branches(self, site: Site, *, scale_in: bool) -> Iterator[BranchPlan]:
        """Yield the matrices behind a norm that change, unless a different norm changed them."""
        for matrix in site.matrices:
            branch = self._branch(matrix, scale_in=scale_in)
            if matrix.weight in self._changed or branch.is_plain:
                continue
            self._changed.add(matrix.weight)
            yield branch

    def _note_matrices(self, site: Site) -> None:
        """Note which matrices have no vectors of their own, and why."""
        adds_before = self.row.scale_in and not site.vector
        if adds_before or self.row.scale_out:
            self._note_missing_vectors(site)
        if not self.strategy.per_branch:
            return
        for matrix in site.matrices:
            if matrix.mixed:
                why = "several interleaved matrices that share their vectors: hg is partial"
                self._note(matrix.weight, f"contains {why}")

    def _note_missing_vectors(self, site: Site) -> None:
        lacks = "no vector after it" if site.vector else "no own vector"
        for name in site.tied:
            self._note(name, f"{lacks}, because it is tied; to have one, untie it first")
        if site.role == "input":
            why = "because it also reads other values, or is not a plain matrix"
            for name in site.unfit:
                self._note(name, f"{lacks}, {why}")

    def _gamma(self, site: Site) -> Gamma:
        """Decide what becomes of a norm's vector."""
        if not site.vector:
            return Gamma.ABSENT
        self._note_remaining(site)
        if not site.matrices:
            return self._kept(site)
        if self.row.scale_in:
            return self._gamma_before_branches(site)
        if site.stays is None:
            return Gamma.FOLDED
        self._note(site.vector, f"constant, and not folded into the matrices: {site.stays}")
        return Gamma.CONSTANT

    def _gamma_before_branches(self, site: Site) -> Gamma:
        """Decide whether each matrix has a vector of its own before it, or the norm has one."""
        if not self._is_heterogeneous(site):
            return self._kept(site)
        if site.stays is None:
            return Gamma.MOVED
        kept = self._kept(site)
        self._note(site.vector, f"shared by all branches, without heterogeneity: {site.stays}")
        return kept

    def _kept(self, site: Site) -> Gamma:
        if site.is_tied:
            self._note(site.vector, f"unchanged: {site.stays}")
        return Gamma.KEPT

    def _is_heterogeneous(self, site: Site) -> bool:
        """Return True if the strategy has a vector per matrix, and there are several."""
        branches = len(site.tied) + len(site.unfit)
        for matrix in site.matrices:
            n_expert = math.prod(self.named[matrix.weight].shape[:-2])
            branches += len(matrix.parts) * n_expert
        return self.strategy.per_branch and branches != 1

    def _note_remaining(self, site: Site) -> None:
        """Note a vector that should move and has no matrices to move to."""
        if not self._should_move(site):
            return
        what = "remains one vector of its norm"
        if site.role == "output" and not self._behind.issuperset(site.unfit):
            why = "operations other than matrices also read it"
            self._note(site.vector, f"{what}: {why}, so matrices that read it get no vectors")
        if site.role == "input" and site.stays is not None and not site.matrices:
            self._note(site.vector, f"{what}: {site.stays}")

    def _should_move(self, site: Site) -> bool:
        if not self.row.scale_in:
            return True
        has_vectors = self.strategy.per_branch or self.row.scale_out
        # of a tied matrix, `_note_matrices` reports the missing vector after it
        return has_vectors and not site.tied

    def _branch(self, matrix: SiteMatrix, *, scale_in: bool) -> BranchPlan:
        """Decide the vectors of a matrix.

        With a norm and no vector the weight keeps its value; its new name and type show that it is
        no plain weight.
        """
        if not self._takes_norm(matrix):
            return BranchPlan(matrix, scale_in, self.row.scale_out, norm=False)
        if matrix.normalized:
            return BranchPlan(matrix, scale_in, scale_out=False, norm=False)
        norm = self._allows_norm(matrix)  # which has the vector after it, too
        return BranchPlan(matrix, scale_in, self.row.scale_out and not norm, norm)

    def _takes_norm(self, matrix: SiteMatrix) -> bool:
        is_spared = matrix.role == "router" or matrix.word in self.dp_at
        is_changed = matrix.weight in self._changed
        return self.row.norm_out and not is_spared and not is_changed

    def _allows_norm(self, matrix: SiteMatrix) -> bool:
        """Return True if the output of a matrix can be normalized; note why it cannot."""
        reasons = list(self._reasons_against_norm(matrix))
        if reasons:
            self._note(matrix.weight, f"dp instead of dnp, because {reasons[0]}")
        return not reasons

    def _reasons_against_norm(self, matrix: SiteMatrix) -> Iterator[str]:
        weight = self.named[matrix.weight]
        is_one = weight.ndim == 2 and len(matrix.parts) == 1
        if matrix.mixed or not is_one:
            yield "it holds several matrices"
        layer = type(self.model.get_submodule(matrix.weight.rpartition(".")[0]))
        if layer is not nn.Linear:
            name = layer.__name__.removeprefix("Parametrized")
            yield f"its layer is a {name}, not an nn.Linear"
        if len(weight) == 1:
            yield "the norm of a single output is its sign"
