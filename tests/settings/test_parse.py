"""Parsers of config files: what they create, replace and say."""

import logging
from pathlib import Path

import pytest

from lightning_sv.errors import ConfigError
from lightning_sv.settings.parse import parse_run
from tests.conftest import CONFIG

RUN = ["--model.optim.lr", "0.001"]


def test_parse_second_list_of_callbacks_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mine = tmp_path / "mine.yaml"
    probe = ["--config", "conf/probes/residual.yaml", "--config", str(mine)]
    for key, warned in (("callbacks+", False), ("callbacks", True)):
        mine.write_text(f"trainer: {{{key}: [lightning.pytorch.callbacks.LearningRateMonitor]}}\n")
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            parse_run([*CONFIG, *RUN, *probe], check_corpus=False)
        assert any("ResidualMonitor" in message for message in caplog.messages) == warned


def test_parse_unknown_variable_names_the_environment(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("data: {corpus: {dir: '${SCRATCH}/r'}}\n")
    with pytest.raises(ConfigError, match="oc.env:SCRATCH"):
        parse_run([*CONFIG, *RUN, "--config", str(config)], check_corpus=False)
