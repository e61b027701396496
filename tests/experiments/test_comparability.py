"""Which differences between runs a comparison warns about."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_sv.experiments.comparability import comparability_warnings, config_of
from lightning_sv.runs.events import Curve, Run


def run(directory: Path, config: dict[str, Any], **summary: Any) -> Run:
    curves = {"val/loss": Curve(np.array([1]), np.array([3.0]))}
    return Run(directory, "llama", config, {"tokens": 1, **summary}, curves)


@pytest.mark.parametrize("name", ["1", "a", "tiny", "cos", "32"])
def test_config_of_directory_name_inside_values_is_kept(name: str) -> None:
    """Only paths of the run's directory are replaced: its name may be part of any value."""
    values = {"name": "tiny", "schedule": "cos", "precision": "32-true", "layers": ["a", 1]}
    directory = Path(name)
    paths = {"run_dir": name, "index": f"{name}/index", "absolute": str(directory.resolve() / "x")}
    config = config_of(run(directory, {"model": values, "data": paths}))
    assert config["model.name"] == "tiny"
    assert config["model.schedule"] == "cos"
    assert config["model.layers"] == '["a", 1]'
    assert config["data.index"] == "<run_dir>/index"
    assert config["data.absolute"] == "<run_dir>/x"
    assert config["model.precision"] == "32-true"


def test_comparability_warnings_values_that_contain_a_directory_name_differ() -> None:
    first = run(Path("runs/a"), {"model": {"optim": {"name": "runs/adamw"}}})
    second = run(Path("runs/b"), {"model": {"optim": {"name": "runs/bdamw"}}})
    (warning,) = comparability_warnings({"first": first, "second": second})
    assert "model.optim.name" in warning


@pytest.mark.parametrize("setting", ["precision", "device", "micro_batch"])
def test_comparability_warnings_names_what_a_resume_changed(setting: str) -> None:
    def segment(value: str) -> dict[str, Any]:
        return {"steps": 4, "max_steps": 8, "seconds": 1.0, "numerics": {setting: value}}

    changed = run(Path("changed"), {}, legs=[segment("1"), segment("2")])
    equal = run(Path("equal"), {}, legs=[segment("1"), segment("1")])
    (warning,) = comparability_warnings({"changed": changed, "equal": equal})
    assert warning.startswith("changed ") and setting in warning and "1, then 2" in warning
