"""Picture of scale vectors by layer and training tokens, from the scalars of `BranchNorms`."""

import math
import re
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import CenteredNorm
from matplotlib.figure import Figure
from numpy.typing import NDArray

from lightning_sv.errors import NotTestableError
from lightning_sv.plots import style
from lightning_sv.runs.events import Curve, Run

# 'branch_norm/layer0/q_proj/gamma_in'; the norm of gamma over sqrt(width), which is its rms
_TAG = re.compile(r"branch_norm/(layer\d+|head)/([^/]+)/(gamma\w*)")
# 'gamma' is that of a norm on the output of a branch: Q/K-norm, Post-Norm
_SIDES = {"gamma_in": "input side", "gamma_out": "output side", "gamma": "output side"}
# rms of gamma at the start of training
_START = 1.0
_MOST_COLUMNS = 4
_MOST_LABELS = 12  # on an axis of layers
_PANEL_WIDTH = 3.0  # inches
_PANEL_HEIGHT = 2.4


class GammaMap(NamedTuple):
    """Rms of one kind of scale vector over layers and training.

    Attributes:
        title: branches and side, e.g. 'q_proj, k_proj, v_proj: input side'
        places: 'layer0', 'layer1', ..., or 'head'
        tokens: training tokens at each column (N,), strictly increasing
        rms: rms of gamma (len(places), N); nan if it was not logged
    """

    title: str
    places: Sequence[str]
    tokens: NDArray[np.int64]
    rms: NDArray[np.float64]

    def is_drawable(self) -> bool:
        """Return True if there are two columns; the width of a single one is not defined."""
        return len(self.tokens) > 1


def gamma_maps(run: Run) -> list[GammaMap]:
    """Return a map per kind of scale vector that the run logged more than once.

    Branches with equal values at equal places share one: a vector before q, k and v was logged
    three times.
    """
    branches: dict[Hashable, list[str]] = defaultdict(list)
    maps: dict[Hashable, GammaMap] = {}
    for (branch, side), curves in _curves_by_branch(run).items():
        gamma_map = _map_of(curves)
        content = (side, *gamma_map.places, gamma_map.tokens.tobytes(), gamma_map.rms.tobytes())
        branches[content].append(branch)
        title = f"{', '.join(branches[content])}: {side}"
        maps[content] = gamma_map._replace(title=title)
    return [gamma_map for gamma_map in maps.values() if gamma_map.is_drawable()]


def _curves_by_branch(run: Run) -> dict[tuple[str, str], dict[str, Curve]]:
    """Return (branch, side) -> place -> logged rms of gamma."""
    curves: dict[tuple[str, str], dict[str, Curve]] = defaultdict(dict)
    for tag, curve in run.curves.items():
        match = _TAG.fullmatch(tag)
        if match:
            place, branch, kind = match.groups()
            curves[branch, _SIDES[kind]][place] = curve
    return curves


def _map_of(curves: Mapping[str, Curve]) -> GammaMap:
    """Return the map of one branch, without a title, from the curve of each of its places."""
    places = sorted(curves, key=_depth)
    tokens = np.unique(np.concatenate([curve.tokens for curve in curves.values()]))
    rms = np.full((len(places), len(tokens)), np.nan)
    for row, place in enumerate(places):
        columns = np.searchsorted(tokens, curves[place].tokens)
        rms[row, columns] = curves[place].values
    return GammaMap(title="", places=places, tokens=tokens, rms=rms)


def _depth(place: str) -> float:
    """Return the number of a layer; infinity for the head, which follows all layers."""
    number = place.removeprefix("layer")
    return int(number) if number.isdigit() else math.inf


def gamma_figure(run: Run) -> Figure:
    """Draw the rms of gamma by layer and training tokens, one panel per kind of scale vector.

    All panels have the same colours, which diverge from 1, the value at the start of training.

    Raises:
        NotTestableError: the run did not log gamma at two steps or more
    """
    maps = gamma_maps(run)
    if not maps:
        hint = "BranchNorms logs it every branch_norms.every_n_steps steps."
        raise NotTestableError(f"{run.dir} did not log γ at two steps or more. {hint}")

    n_columns = min(_MOST_COLUMNS, len(maps))
    n_rows = math.ceil(len(maps) / n_columns)
    figure = style.new_figure(n_columns, n_rows)
    figure.set_size_inches(_PANEL_WIDTH * n_columns + 1.5, _PANEL_HEIGHT * n_rows + 0.4)
    every_axes = figure.subplots(n_rows, n_columns, squeeze=False).ravel()
    used_axes = list(every_axes[: len(maps)])
    for unused in every_axes[len(maps) :]:
        unused.remove()

    colours = CenteredNorm(_START, _largest_change(maps))
    for axes, gamma_map in zip(used_axes, maps, strict=True):
        mesh = _draw_map(axes, gamma_map, colours)
    figure.colorbar(mesh, ax=used_axes, label="rms of γ; 1 at the start", aspect=30)
    figure.suptitle(run.label, x=0.012, ha="left", fontsize=10, color=style.GREY)
    return figure


def _largest_change(maps: Sequence[GammaMap]) -> float:
    """Return the largest finite distance from the start; 1 if all are 0: colours need a range."""
    values = np.concatenate([gamma_map.rms.ravel() for gamma_map in maps])
    distances = np.abs(values[np.isfinite(values)] - _START)
    return float(distances.max(initial=0.0)) or 1.0


def _draw_map(axes: Axes, gamma_map: GammaMap, colours: CenteredNorm) -> QuadMesh:
    """Draw one panel, with the first layer at the bottom."""
    row_edges = np.arange(len(gamma_map.places) + 1) - 0.5
    column_edges = _edges_around(gamma_map.tokens)
    mesh = axes.pcolormesh(
        column_edges, row_edges, gamma_map.rms, cmap="RdBu_r", norm=colours, rasterized=True
    )
    labels = [place.removeprefix("layer") for place in gamma_map.places]
    step = math.ceil(len(labels) / _MOST_LABELS)
    axes.set_yticks(range(0, len(labels), step), labels[::step])
    axes.set_facecolor("#DDDDDD")  # not logged, or not finite
    axes.set(ylabel="layer", title=gamma_map.title)
    style.set_token_axis(axes)
    style.set_style(axes)
    axes.grid(visible=False)
    return mesh


def _edges_around(tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return N + 1 edges of cells: the middle between two points, and the outer points."""
    middles = (tokens[1:] + tokens[:-1]) / 2
    return np.concatenate([tokens[:1], middles, tokens[-1:]])
