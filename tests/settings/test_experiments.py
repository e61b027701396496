"""conf/experiment: one complete file per run, found by its name, and equal to the layers that it names."""

import re
from pathlib import Path
from typing import Any

import pytest

from lightning_sv.settings.parse import parse_run
from lightning_sv.settings.yaml_file import read_yaml
from tests.conftest import Refused

CONF = Path(__file__).parents[2] / "conf"
FILES = sorted((CONF / "experiment").glob("*.yaml"))


def merged(into: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    for key, value in more.items():
        both = isinstance(value, dict) and isinstance(into.get(key), dict)
        into[key] = merged(into[key], value) if both else value
    return into


def test_experiment_file_equals_its_layers() -> None:
    assert len(FILES) > 8
    for path in FILES:
        head = re.search(r"^# = (.*), scale (\w+)\.$", path.read_text(), re.MULTILINE)
        assert head is not None and f"--config {path.stem}\n" in path.read_text(), path.name
        layers: dict[str, Any] = {}
        for layer in head[1].split(" + "):
            merged(layers, read_yaml(CONF / f"{layer}.yaml", layer))
        layers["model"]["scale"] = head[2]
        assert read_yaml(path, path.name) == layers, path.name
        parse_run(["--config", path.stem], check_corpus=False)[0].meta()  # its strategy fits its model


def test_config_name_is_found_in_the_working_directory_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_run(["--config", "tiny-llama"], check_corpus=False)[0].label == "llama"
    own = tmp_path / "conf/experiment/tiny-llama.yaml"
    own.parent.mkdir(parents=True)
    own.write_text((CONF / "experiment/tiny-llama.yaml").read_text().replace("scale: llama", "scale: hg"))
    assert parse_run(["--config", "tiny-llama"], check_corpus=False)[0].label == "hg"
    assert "tiny-lama" in refused("fit", "--config", "tiny-lama")
