"""Picture of gamma by layer and training tokens: rows, columns and colours are those of the logged
scalars."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from matplotlib.collections import QuadMesh

from lightning_sv.errors import NotTestableError
from lightning_sv.plots.gamma_plot import gamma_figure, gamma_maps
from lightning_sv.runs.events import Curve, Run

TOKENS = np.array([0, 1_000, 3_000])


def run_with(curves: dict[str, list[float]]) -> Run:
    logged = {
        f"branch_norm/{tag}": Curve(TOKENS[: len(x)], np.array(x)) for tag, x in curves.items()
    }
    return Run(Path("runs/a"), "hg+dp", {}, {}, logged)


def test_gamma_maps_rows_are_layers_by_number_then_the_head() -> None:
    places = ("layer10", "head", "layer2")
    (made,) = gamma_maps(run_with({f"{place}/x/gamma_in": [1.0, 2.0, 3.0] for place in places}))
    assert made.places == ["layer2", "layer10", "head"]


def test_gamma_maps_branches_of_one_vector_share_a_map() -> None:
    shared = {f"layer0/{name}/gamma_in": [1.0, 1.1, 1.2] for name in ("q_proj", "k_proj")}
    own = {"layer0/v_proj/gamma_in": [1.0, 0.9, 0.8], "layer0/q_proj/gamma_out": [1.0, 1.1, 1.2]}
    norms_of_weights = {"layer0/q_proj/W": [5.0, 6.0, 7.0], "mean/q_proj/gamma_in": [1.0, 1.1, 1.2]}
    titles = [made.title for made in gamma_maps(run_with(shared | own | norms_of_weights))]
    assert titles == ["q_proj, k_proj: input side", "v_proj: input side", "q_proj: output side"]


def test_gamma_maps_branches_at_different_places_have_maps_of_their_own() -> None:
    """One layer and the head have equal values, e.g. if no vector is trained."""
    curves = {"layer0/q_proj/gamma_in": [1.0, 1.0], "head/lm_head/gamma_in": [1.0, 1.0]}
    maps = {made.title: made.places for made in gamma_maps(run_with(curves))}
    assert maps == {"q_proj: input side": ["layer0"], "lm_head: input side": ["head"]}


def test_gamma_maps_value_that_was_not_logged_is_nan() -> None:
    (made,) = gamma_maps(
        run_with({"layer0/x/gamma_in": [1.0, 2.0, 3.0], "layer1/x/gamma_in": [1.0]})
    )
    np.testing.assert_array_equal(made.tokens, TOKENS)
    np.testing.assert_array_equal(made.rms, [[1.0, 2.0, 3.0], [1.0, np.nan, np.nan]])


@pytest.mark.parametrize(
    ("values", "limits"),
    [
        ([1.0, 1.1, 1.5], (0.5, 1.5)),
        ([1.0, 0.75, 1.0], (0.75, 1.25)),
        ([1.0, 1.0, np.inf], (0.0, 2.0)),
    ],
)
def test_gamma_figure_colours_diverge_from_one(
    values: list[float], limits: tuple[float, float]
) -> None:
    axes, *_ = gamma_figure(run_with({"layer0/x/gamma_in": values})).axes
    (mesh,) = axes.collections
    assert isinstance(mesh, QuadMesh)
    assert mesh.get_clim() == pytest.approx(limits)
    edges = mesh.get_coordinates()[0, :, 0]
    np.testing.assert_array_equal(edges, [0, 500, 2_000, 3_000])


def test_gamma_figure_every_kind_of_vector_has_a_panel() -> None:
    curves = {}
    for i, kind in enumerate(product(("q", "k", "v"), ("gamma_in", "gamma_out"))):
        for layer in range(3):
            curves[f"layer{layer}/{'/'.join(kind)}"] = [1.0, 1.0 + layer, 1.0 + i]
    assert len(gamma_figure(run_with(curves)).axes) == 6 + 1  # with the bar of colours


@pytest.mark.parametrize("curves", [{}, {"layer0/x/W": [1.0, 2.0]}, {"layer0/x/gamma_in": [1.0]}])
def test_gamma_figure_run_without_a_history_is_refused(curves: dict[str, list[float]]) -> None:
    with pytest.raises(NotTestableError):
        gamma_figure(run_with(curves))
