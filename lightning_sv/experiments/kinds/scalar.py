"""A logged scalar against tokens."""

from collections.abc import Iterator

import numpy as np

from lightning_sv.experiments.arms import baseline_first
from lightning_sv.experiments.kinds.base import Drawing, LoadedPanel, PanelKind, TextTable
from lightning_sv.experiments.spec import PanelSpec


class ScalarKind(PanelKind):
    """A logged scalar above 0, such as the sharpness."""

    claims = ("lower",)
    fields = ("tag",)

    def problems(self, panel: PanelSpec) -> Iterator[str]:
        """Yield an error if the panel names no scalar."""
        if not panel.tag:
            yield f"tag is '' and kind is {panel.kind!r}; expected a tag, e.g. sharpness/all/lambda_max."

    def table(self, panel: LoadedPanel) -> TextTable:
        """Return one row per arm that logged the scalar: its geometric mean at the end, and each seed."""
        tag, rows = panel.spec.tag, []
        for arm in baseline_first(panel.arms):
            ends = [run.curve(tag).values[-1] for run in arm.runs if tag in run.curves]
            if ends and min(ends) > 0:
                mean = np.exp(np.log(ends).mean())
                rows.append([arm.name, f"{mean:.4g}", ", ".join(f"{end:.4g}" for end in ends)])
        if not rows:
            return TextTable()
        return TextTable(["arm", f"{tag} at the end, geometric mean", "each seed"], rows)

    def draw(self, panel: LoadedPanel) -> Drawing:
        """Draw the scalar of each arm."""
        from lightning_sv.experiments.report.plots import scalar_plots  # it imports matplotlib

        return scalar_plots(panel)
