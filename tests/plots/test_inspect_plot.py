"""The picture of the scale vectors of one model."""

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_sv.plots import inspect_plot


@pytest.mark.parametrize(
    ("outside", "labels"),
    [
        ([], ["0", "2", "4", "6", "8", "10", "12"]),
        (["head.lm_head.scale_in"], ["0", "2", "4", "6", "8", "10", "head"]),
        (["head.lm_head.scale_in", "final_norm"], ["0", "2", "4", "6", "8", "10", "outside"]),
    ],
)
def test_depth_ticks_leave_room_for_vectors_outside_layers(
    outside: list[str], labels: list[str]
) -> None:
    vectors: list[Any] = [SimpleNamespace(name="norm", depth=layer) for layer in range(13)]
    vectors += [SimpleNamespace(name=name, depth=None) for name in outside]
    ticks = inspect_plot._depth_ticks(vectors)
    assert ticks.end == 13 and list(ticks.labels.values()) == labels
