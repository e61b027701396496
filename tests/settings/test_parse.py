"""Parsers of config files: messages of OmegaConf."""

from pathlib import Path

import pytest

from lightning_sv.errors import ConfigError
from lightning_sv.lit.run_arguments import parse_run
from tests.conftest import CONFIG

RUN = ["--model.optim.lr", "0.001"]


def test_parse_unknown_variable_names_the_environment(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("data: {corpus: {dir: '${SCRATCH}/r'}}\n")
    with pytest.raises(ConfigError, match="oc.env:SCRATCH"):
        parse_run([*CONFIG, *RUN, "--config", str(config)], check_corpus=False)
