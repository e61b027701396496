"""The bars of a preparation."""

import pytest
from rich.progress import Progress

from lightning_sv.corpus.progress import MeanSpeed


def test_the_speed_of_a_phase_is_not_that_of_its_last_steps() -> None:
    """6 MB in 2 seconds are 3 MB/s, also where all steps come together at the end."""
    now = 0.0
    bars = Progress(get_time=lambda: now)
    task = bars.add_task("encoding", total=6_000_000)
    assert not MeanSpeed().render(bars.tasks[task]).plain
    for now in (1.98, 1.99, 2.0):  # noqa: B007 (the clock)
        bars.advance(task, 2_000_000)
    assert bars.tasks[task].speed == pytest.approx(2e8)  # of the last steps
    assert MeanSpeed().render(bars.tasks[task]).plain == "3.0 MB/s"
