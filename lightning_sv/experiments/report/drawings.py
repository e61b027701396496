"""Plots of a panel, by its kind."""

from collections.abc import Callable

from lightning_sv.experiments.kinds.base import LoadedPanel
from lightning_sv.experiments.report.curve_plots import curve_plots
from lightning_sv.experiments.report.grid_plots import grid_plots
from lightning_sv.experiments.report.plot import Drawing
from lightning_sv.experiments.report.scalar_plots import branch_plots, scalar_plots
from lightning_sv.experiments.report.scaling_plots import length_plots, scaling_plots

#: `kind` of a panel in conf/paper -> its plots; other kinds have a table alone
DRAWINGS: dict[str, Callable[[LoadedPanel], Drawing]] = {
    "curves": curve_plots,
    "scaling": scaling_plots,
    "lengths": length_plots,
    "grid": grid_plots,
    "qkv": branch_plots,
    "scalar": scalar_plots,
}


def draw(panel: LoadedPanel) -> Drawing:
    """Draw the plots of a panel."""
    drawing = DRAWINGS.get(panel.spec.kind)
    return Drawing() if drawing is None else drawing(panel)
