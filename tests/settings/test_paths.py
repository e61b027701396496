"""Paths that a user gives mean one thing everywhere; what can be no path is refused by name."""

from pathlib import Path

import pytest

from lightning_sv.__main__ import main
from lightning_sv.corpus import CorpusConfig
from lightning_sv.corpus.sources.files import source_files
from lightning_sv.settings.cli_args import parse_overrides
from lightning_sv.settings.parse import _parser
from lightning_sv.settings.paths import PATHS, WITH_PATHS, expand_path
from lightning_sv.settings.plain_parser import PlainParser
from tests.conftest import thinned
from tests.test_imports import CONFIG


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WORK", f"{tmp_path}/work")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "$kept").mkdir()
    return tmp_path


def test_home_and_variables_are_written_out(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    for given, path in {"~/a": f"{home}/a", "$WORK/a": f"{home}/work/a", "${WORK}": f"{home}/work", "a b": "a b",
                        "data/stdlib": "data/stdlib", "$kept": "$kept", "price $5": "price $5"}.items():  # fmt: skip
        assert expand_path(given, "run_dir") == path


WRONG = ["", " ", "$UNSET_HERE/a", "x" * 300, "loop/a", "a\0b"]


@pytest.mark.parametrize("given", WRONG)
def test_no_path_is_refused_by_its_key(given: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    with pytest.raises(ValueError, match="^run_dir is "):
        expand_path(given, "run_dir")
    parser = PlainParser("report", "")
    parser.add_argument("--out", type=Path)
    with pytest.raises(ValueError, match="--out is "):
        parser.parse_args(["--out", given])
    with pytest.raises(ValueError, match="--config is "):
        parse_overrides(["--config", given], "compare")


@pytest.mark.parametrize("key", thinned([*PATHS, *WITH_PATHS], ["run_dir", "data.corpus.dir", "data.corpus.source"]))
def test_every_path_of_a_run_is_expanded_by_the_parser(key: str, home: Path) -> None:
    """From the command line and from YAML."""
    before, given = ("files:", "files:$WORK/x") if key == "data.corpus.source" else ("", "$WORK/x")
    (home / "layer.yaml").write_text(f"{key}: {given}\n")
    for words in ([f"--{key}", given], ["--config", "~/layer.yaml"], ["--config=$HOME/layer.yaml"]):
        assert _parser().parse_args([*CONFIG, *words])[key] == f"{before}{home}/work/x"


def test_a_refused_path_leaves_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(home)
    had = sorted(home.iterdir())
    for words in (
        ["report", ""],
        ["fit", *CONFIG, "--run_dir", ""],
        ["theory", "--out", "x" * 300],
        ["generate", "loop"],
        ["export", "r", "$UNSET_HERE"],
        ["roles", "loop"],
        ["compare", "--a", "nop", "--b", "hg", "--out", ""],
    ):
        assert main(words) == 2, words
        said = capsys.readouterr().err
        assert said.startswith("error: ") and said.count("\n") == 1, words
    assert sorted(home.iterdir()) == had


def _texts(spec: str) -> list[Path]:
    return source_files(CorpusConfig(source=f"files:{spec}"))[0]


def test_a_name_may_hold_a_comma(tmp_path: Path) -> None:
    (tmp_path / "Müller, Hans").mkdir()
    text = tmp_path / "Müller, Hans/a.txt"
    text.write_text("text")
    assert _texts(str(text.parent)) == [text]
    (tmp_path / "b.txt").write_text("text")
    assert _texts(f"{tmp_path}/b.txt, {tmp_path}") == [tmp_path / "b.txt", text]
