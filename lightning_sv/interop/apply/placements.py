"""Where a strategy places scale vectors in a model, decided before anything is changed.

A norm's vector gamma and the branches behind it, under the placements of a strategy:

    kept       gamma * xhat -> W           the norm keeps it, in the strategy's parameterization
    moved      xhat -> W diag(gamma_in)    each branch has a vector of its own with its value
    folded     xhat -> (W diag(gamma))     the strategy has no vectors before matrices
    constant   gamma * xhat -> W           the same, but matrices cannot absorb it
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum, auto

from torch import nn

from lightning_sv.errors import expect
from lightning_sv.interop.apply.matrices import TracedBranch
from lightning_sv.interop.apply.notes import notes_on_matrices
from lightning_sv.interop.apply.traced_norm import TracedNorm, branches_of
from lightning_sv.scale import ScaleStrategy

_KEEPS_ITS_NORM = (
    "its output is already normalized, so it keeps that norm and its vector, which heads may share"
)


class Gamma(Enum):
    """What becomes of the vector of a norm."""

    ABSENT = auto()
    KEPT = auto()
    MOVED = auto()
    FOLDED = auto()
    CONSTANT = auto()


@dataclass(frozen=True)
class PlacedBranch:
    """A branch, and what it gets after it.

    Attributes:
        branch: the matrix
        norm_out: whether its output is normalized
        scale_out: whether it gets a vector after it
    """

    branch: TracedBranch
    norm_out: bool
    scale_out: bool


@dataclass(frozen=True)
class PlacedNorm:
    """A norm, what becomes of its vector, and the branches behind it that change.

    Attributes:
        norm: the norm
        gamma: what becomes of its vector
        scale_in: whether each of its branches gets a vector before it
        branches: branches that change
    """

    norm: TracedNorm
    gamma: Gamma
    scale_in: bool
    branches: tuple[PlacedBranch, ...]


class Placements:
    """Placements of a strategy's vectors at all norms of a model.

    `dp_at` has the last parts of the names of branches with `dp` instead of `dnp`.

    Attributes:
        norms: norms that change
        notes: (name, deviation from the strategy and its reason)

    Raises:
        ConfigError: `dp_at` names no branch
    """

    def __init__(
        self,
        model: nn.Module,
        strategy: ScaleStrategy,
        dp_at: Collection[str],
        norms: list[TracedNorm],
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
        for norm in norms:
            if norm.role == "input":
                self._behind.update(norm.readers)
        self._check_dp_at(norms)
        self.norms = [self._placed(norm) for norm in norms if self._has_known_form(norm)]

    @property
    def notes(self) -> list[tuple[str, str]]:
        """Pairs of a name and a deviation from the strategy with its reason."""
        return list(self._notes)

    def _check_dp_at(self, norms: list[TracedNorm]) -> None:
        words: dict[str, None] = {}
        wanted = "none without dnp."
        if self.row.norm_out:
            words = dict.fromkeys(branch.word for branch in branches_of(norms))
            wanted = f"one of {' '.join(words)}."
        for word in self.dp_at:
            expect(word in words, "dp_at", repr(word), wanted)

    def _has_known_form(self, norm: TracedNorm) -> bool:
        """Return True if a norm multiplies by w or 1 + w; note it otherwise."""
        if norm.origin in (0.0, 1.0):
            return True
        why = "because its norm multiplies by neither w nor 1 + w"
        self._note(norm.vector, f"unchanged, {why}")
        return False

    def _note(self, name: str, what: str) -> None:
        self._notes[name, what] = None

    def _placed(self, norm: TracedNorm) -> PlacedNorm:
        for name, note in notes_on_matrices(norm, self.strategy):
            self._note(name, note)
        gamma = self._gamma(norm)
        scale_in = gamma is Gamma.MOVED
        if gamma is Gamma.ABSENT:
            scale_in = self.row.scale_in and self.strategy.per_branch
        branches = tuple(self._placed_branches(norm, scale_in))
        return PlacedNorm(norm, gamma, scale_in, branches)

    def _gamma(self, norm: TracedNorm) -> Gamma:
        """Decide what becomes of a norm's vector, and note why it deviates from the strategy."""
        if not norm.vector:
            return Gamma.ABSENT
        if not norm.branches:
            self._note_without_branches(norm)
            return Gamma.KEPT
        if self.row.scale_in:
            return self._gamma_before_branches(norm)
        if norm.stays is None:
            return Gamma.FOLDED
        self._note(norm.vector, f"constant, and not folded into the matrices: {norm.stays}")
        return Gamma.CONSTANT

    def _gamma_before_branches(self, norm: TracedNorm) -> Gamma:
        """Decide whether each branch gets a vector of its own, or the norm keeps one for all."""
        if not self._is_heterogeneous(norm):
            return Gamma.KEPT
        if norm.stays is None:
            return Gamma.MOVED
        self._note(norm.vector, f"shared by all branches, without heterogeneity: {norm.stays}")
        return Gamma.KEPT

    def _note_without_branches(self, norm: TracedNorm) -> None:
        """Note why a vector stays in its norm, although the strategy has vectors at matrices."""
        has_vectors_at_matrices = self.strategy.per_branch or self.row.scale_out
        is_noted = bool(norm.tied)  # a note says that the matrix has no vector after it
        if self.row.scale_in and (is_noted or not has_vectors_at_matrices):
            return
        what = "remains one vector of its norm"
        if norm.role == "input":
            self._note(norm.vector, f"{what}: {norm.stays}")
        elif not self._behind.issuperset(norm.unfit):
            why = "operations other than matrices also read it"
            self._note(norm.vector, f"{what}: {why}, so matrices that read it get no vectors")

    def _is_heterogeneous(self, norm: TracedNorm) -> bool:
        """Return True if the strategy has a vector per matrix, and there are several."""
        n_branches = len(norm.tied) + len(norm.unfit)
        for branch in norm.branches:
            n_expert = math.prod(self.named[branch.weight].shape[:-2])
            n_branches += len(branch.parts) * n_expert
        return self.strategy.per_branch and n_branches != 1

    def _placed_branches(self, norm: TracedNorm, scale_in: bool) -> Iterator[PlacedBranch]:
        """Yield the branches that change, unless a different norm changed them."""
        for branch in norm.branches:
            if branch.weight in self._changed:
                continue
            placed = self._placed_branch(branch)
            changes_output = placed.norm_out or placed.scale_out
            if scale_in or changes_output:
                self._changed.add(branch.weight)
                yield placed

    def _placed_branch(self, branch: TracedBranch) -> PlacedBranch:
        """Decide what a branch gets after it."""
        is_spared = branch.role == "router" or branch.word in self.dp_at
        if is_spared or not self.row.norm_out:
            return PlacedBranch(branch, norm_out=False, scale_out=self.row.scale_out)

        if branch.normalized:
            self._note(branch.weight, _KEEPS_ITS_NORM)
            return PlacedBranch(branch, norm_out=False, scale_out=False)
        why = self._reason_against_norm(branch)
        if why is not None:
            self._note(branch.weight, f"dp instead of dnp, because {why}")
        return PlacedBranch(branch, norm_out=why is None, scale_out=self.row.scale_out)

    def _reason_against_norm(self, branch: TracedBranch) -> str | None:
        """Return why the output of a branch cannot be normalized; None if it can."""
        weight = self.named[branch.weight]
        has_experts = weight.ndim > 2
        if has_experts or branch.mixed or len(branch.parts) > 1:
            return "it holds several matrices; for dnp give each its own nn.Linear"
        layer = type(self.model.get_submodule(branch.weight.rpartition(".")[0]))
        if layer is not nn.Linear:
            name = layer.__name__.removeprefix("Parametrized")
            return f"its layer is a {name}, not an nn.Linear"
        if len(weight) == 1:
            return "the norm of a single output is its sign"
        return None
