"""Norms of the query, key and value branches against tokens."""

from lightning_sv.experiments.kinds.base import Drawing, LoadedPanel, PanelKind


class NormsKind(PanelKind):
    """Growth of the norms of Q, K and V, which the callback `BranchNorms` logs."""

    claims = ("apart",)

    def draw(self, panel: LoadedPanel) -> Drawing:
        """Draw one plot per arm."""
        # matplotlib is slow to import
        from lightning_sv.experiments.report.scalar_plots import branch_plots

        return branch_plots(panel)
