"""Norms of the query, key and value branches against tokens."""

from lightning_sv.experiments.kinds.base import PanelKind


class NormsKind(PanelKind):
    """Growth of the norms of Q, K and V, which the callback `BranchNorms` logs."""

    claims = ("apart",)
