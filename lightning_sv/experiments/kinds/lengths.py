"""Differences to the baseline against the length of training."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

from lightning_sv.experiments.kinds.base import LOSS_CLAIMS, Choices, Drawing, LoadedPanel
from lightning_sv.experiments.kinds.curves import difference_table
from lightning_sv.experiments.kinds.scaling import ScalingKind
from lightning_sv.experiments.spec import PanelSpec

if TYPE_CHECKING:  # it imports torch, which a report does not need
    from lightning_sv.experiments.resolver import RunResolver
    from lightning_sv.experiments.run_spec import RunSpec


class LengthsKind(ScalingKind):
    """Loss of each arm after several lengths of training, which are models of the budget."""

    claims = LOSS_CLAIMS
    has_laws = False
    distinguished_by = "the steps"

    def warnings(self, panel: PanelSpec, choices: Choices) -> list[str]:
        """Return no warning, because no law is fitted."""
        return []

    def point_names(
        self,
        panel: PanelSpec,
        run_specs: Sequence["RunSpec"],
        resolver: "RunResolver",
        choices: Choices,
    ) -> list[str]:
        """Return the tokens per parameter of the baseline; arms with more vectors have 1% fewer."""
        (baseline,) = (arm for arm in panel.arms.values() if arm.baseline)
        ratios = [
            resolver.resolve(panel, baseline, role).tokens_per_param for role in choices.roles
        ]
        return [f"{ratio:.3g} tokens a parameter" for ratio in ratios]

    def value(self, run_spec: "RunSpec") -> float:
        """Return the tokens per parameter."""
        return run_spec.tokens_per_param

    def table(self, panel: LoadedPanel) -> pd.DataFrame:
        """Return one row per arm and length."""
        return difference_table(panel)

    def draw(self, panel: LoadedPanel) -> Drawing:
        """Draw the difference to the baseline at each length."""
        # matplotlib is slow to import
        from lightning_sv.experiments.report.scaling_plots import LENGTHS, gap_plot

        return Drawing([gap_plot(panel, {}, LENGTHS)])
