"""Paths that a user gives mean one thing everywhere; what can be no path is refused by name."""

from pathlib import Path

import pytest

from lightning_sv.corpus import CorpusConfig
from lightning_sv.corpus.sources.files import source_files
from lightning_sv.settings.parse import _parser
from lightning_sv.settings.paths import PATHS, WITH_PATHS, expand_path
from lightning_sv.settings.plain_parser import PlainParser
from lightning_sv.settings.yaml_file import parse_overrides
from tests.conftest import CONFIG, thinned


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WORK", f"{tmp_path}/work")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "$kept").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_expand_path_home_and_variables_are_written_out(home: Path) -> None:
    for given, path in {"~/a": f"{home}/a", "$WORK/a": f"{home}/work/a", "${WORK}": f"{home}/work", "a b": "a b",
                        "data/stdlib": "data/stdlib", "$kept": "$kept", "price $5": "price $5"}.items():  # fmt: skip
        assert expand_path(given, "run_dir") == path


@pytest.mark.parametrize("given", ["", " ", "$UNSET_HERE/a", "x" * 300, "loop/a", "a\0b"])
def test_expand_path_no_path_is_refused_by_its_key(given: str, home: Path) -> None:
    with pytest.raises(ValueError, match="^run_dir is "):
        expand_path(given, "run_dir")
    parser = PlainParser("report", "")
    parser.add_argument("--out", type=Path)
    with pytest.raises(ValueError, match="--out is "):
        parser.parse_args(["--out", given])
    with pytest.raises(ValueError, match="--config is "):
        parse_overrides(["--config", given], "compare")


@pytest.mark.parametrize("key", thinned([*PATHS, *WITH_PATHS], ["run_dir", "data.corpus.dir", "data.corpus.source"]))
def test_parser_every_path_of_a_run_is_expanded(key: str, home: Path) -> None:
    """From the command line and from YAML."""
    before, given = ("files:", "files:$WORK/x") if key == "data.corpus.source" else ("", "$WORK/x")
    (home / "layer.yaml").write_text(f"{key}: {given}\n")
    for words in ([f"--{key}", given], ["--config", "~/layer.yaml"], ["--config=$HOME/layer.yaml"]):
        assert _parser().parse_args([*CONFIG, *words])[key] == f"{before}{home}/work/x"


def test_source_files_name_with_a_comma_is_one_path(tmp_path: Path) -> None:
    named, other = tmp_path / "Müller, Hans/a.txt", tmp_path / "b.txt"
    for path in (named, other):
        path.parent.mkdir(exist_ok=True)
        path.write_text("text")
    for spec, found in ((named.parent, [named]), (f"{other}, {tmp_path}", [other, named])):
        assert source_files(CorpusConfig(source=f"files:{spec}"))[0] == found
