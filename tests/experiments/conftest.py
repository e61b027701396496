"""Figures in the folder of conf/, with fewer resamples of their scaling laws."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from lightning_sv.analysis.scaling import fit_scaling


@pytest.fixture(autouse=True, scope="package")
def _few_resamples() -> Iterator[None]:
    """Draw 40 in place of 500, which take seconds per law; tests/analysis/test_scaling.py tests the intervals."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_sv.experiments.results.fit_scaling", partial(fit_scaling, resamples=40))
        yield


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
