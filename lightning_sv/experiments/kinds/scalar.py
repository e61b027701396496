"""Logged scalars against tokens: any one above 0, or the norms of the branches."""

import numpy as np
import pandas as pd

from lightning_sv.errors import expect
from lightning_sv.experiments.arms import baseline_first
from lightning_sv.experiments.kinds.base import Drawing, LoadedPanel, PanelKind
from lightning_sv.experiments.spec import PanelSpec


class ScalarKind(PanelKind):
    """A logged scalar above 0, such as the sharpness."""

    claims = ("lower",)
    fields = ("tag",)

    def check(self, panel: PanelSpec) -> None:
        """Check that the panel names a scalar."""
        expected = "a tag, e.g. sharpness/all/lambda_max."
        expect(bool(panel.tag), "tag of a panel of kind 'scalar'", repr(panel.tag), expected)

    def table(self, panel: LoadedPanel) -> pd.DataFrame:
        """Return one row per arm that logged the scalar: geometric mean at the end, each seed."""
        tag = panel.spec.tag
        rows = []
        for arm in baseline_first(panel.arms):
            logged = [run.curves[tag] for run in arm.runs if tag in run.curves]
            ends = [curve.values[-1] for curve in logged]
            if min(ends, default=0.0) <= 0:
                continue

            mean = np.exp(np.log(ends).mean())
            rows.append(
                {
                    "arm": arm.name,
                    f"{tag} at the end, geometric mean": f"{mean:.4g}",
                    "each seed": ", ".join(f"{end:.4g}" for end in ends),
                }
            )
        return pd.DataFrame(rows)

    def draw(self, panel: LoadedPanel) -> Drawing:
        """Draw the scalar of each arm."""
        # matplotlib is slow to import
        from lightning_sv.experiments.report.scalar_plots import scalar_plots

        return scalar_plots(panel)


class NormsKind(PanelKind):
    """Growth of the norms of Q, K and V, which the callback `BranchNorms` logs."""

    claims = ("apart",)

    def check(self, panel: PanelSpec) -> None:
        """Check that each claim names two scalars."""
        for claim in panel.claims:
            expect(len(claim.tags) == 2, "tags of a claim 'apart'", claim.tags, "two tags.")

    def draw(self, panel: LoadedPanel) -> Drawing:
        """Draw one plot per arm."""
        # matplotlib is slow to import
        from lightning_sv.experiments.report.scalar_plots import branch_plots

        return branch_plots(panel)
