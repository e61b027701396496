"""The YAML of a run: keys given twice, sections that hold nothing, files that are none."""

import doctest
import os
from pathlib import Path
from typing import Any

import pytest

from lightning_sv.experiments.spec import load_figure
from lightning_sv.runs.directory import CONFIG, read_config
from lightning_sv.settings import yaml_file
from lightning_sv.settings.cli_args import read_leaves
from lightning_sv.settings.parse import _parser, parse_run
from lightning_sv.settings.parser import _keys
from lightning_sv.settings.yaml_file import SECTIONS
from tests.conftest import thinned
from tests.test_imports import CONFIG as LAYERS


def layer(folder: Path, text: str) -> list[str]:
    file = folder / "layer.yaml"
    file.write_text(text)
    return [*LAYERS, "--config", str(file)]


def trained(args: list[str]) -> tuple[Any, ...]:
    """What a run is, as far as these tests change it."""
    model, data, trainer = parse_run(args, check_corpus=False)
    return model.label, model.lr, data.corpus, trainer


def test_the_sections_are_those_of_the_parser() -> None:
    keys = {key for key in _keys(_parser()) if "." in key}
    assert {key.rpartition(".")[0] for key in keys} <= SECTIONS
    assert doctest.testmod(yaml_file).failed == 0


@pytest.mark.parametrize(
    ("text", "key", "line"),
    [
        ("trainer: {max_steps: 5}\nmodel: {scale: llama}\ntrainer: {precision: 64}\n", "trainer", 3),
        ("model:\n  scale: llama\n  scale: llama\n", "model.scale", 3),
        ("model.scale: llama\nmodel:\n  scale: hg\n", "model.scale", 3),
        ("trainer:\n  plugins:\n  - {a: 1,\n     a: 2}\n", "a", 4),
    ],
)
def test_a_key_given_twice_is_refused_with_its_line(text: str, key: str, line: int, tmp_path: Path) -> None:
    """By every reader of YAML: a run's layers, a comparison's, a run directory, a figure of the paper."""
    args = layer(tmp_path, text)
    (tmp_path / CONFIG).write_text(text)
    (tmp_path / "paper/budgets").mkdir(parents=True)
    (tmp_path / "paper/mine.yaml").write_text(text)
    for read in (
        lambda: parse_run(args, check_corpus=False),
        lambda: read_leaves(tmp_path / "layer.yaml"),
        lambda: read_config(tmp_path),
        lambda: load_figure("mine", tmp_path),
    ):
        with pytest.raises(ValueError, match=rf"{tmp_path}.* line {line}: {key} is given twice"):
            read()


def test_a_key_of_a_word_given_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--trainer .*max_steps is given twice"):
        parse_run([*LAYERS, "--trainer", "{max_steps: 1, max_steps: 2}"], check_corpus=False)
    args = layer(tmp_path, "max_steps: 1\nmax_steps: 2\n")
    with pytest.raises(ValueError, match="--trainer .*layer.yaml.* max_steps is given twice"):
        parse_run([*LAYERS, "--trainer", args[-1]], check_corpus=False)


EMPTY = [
    "",
    "# nothing\n",
    "null\n",
    "{}\n",
    *(f"{'.'.join(k.split('.'))}:\n" for k in sorted(SECTIONS)),
    "model:\n  optim:\n  backbone: {}\n",
    "data:\n  corpus: null\n",
]


@pytest.mark.parametrize(
    "text", thinned(EMPTY, [*EMPTY[:2], *EMPTY[3::5]]),
)  # fmt: skip
def test_a_layer_that_holds_nothing_changes_nothing(text: str, tmp_path: Path) -> None:
    assert trained(layer(tmp_path, text)) == trained(LAYERS)


@pytest.mark.parametrize("words", [["--trainer", "null"], ["--model.optim", ""], ["--trainer="]])
def test_a_section_is_not_emptied_by_a_word(words: list[str]) -> None:
    with pytest.raises(ValueError, match=words[0].partition("=")[0]):
        parse_run([*LAYERS, *words], check_corpus=False)


def test_a_config_is_a_regular_file(tmp_path: Path) -> None:
    """A pipe can be read once, and a run reads its files more often; nothing waits for one."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "absent.yaml", "/dev/null"):
        with pytest.raises(ValueError, match=f"--config {path}"):
            parse_run([*LAYERS, "--config", str(path)], check_corpus=False)
