"""Fixtures of this floor."""

from pathlib import Path

import pytest

from lightning_sv.__main__ import main
from tests.conftest import write_run_args


@pytest.fixture(scope="session")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run that a plain Llama computes, and one that needs code of its own."""
    root = tmp_path_factory.mktemp("runs")
    args = [*write_run_args(corpus, root), "--data.val_sequences", "4", "--data.validations", "1"]
    for name, scale in (("plain", "hg+dp+or"), ("own", "unified")):
        assert main(["fit", *args, "--model.scale", scale, "--run_dir", str(root / name)]) == 0
    return {name: root / name for name in ("plain", "own")}
