"""Names on the command line become config files."""

from pathlib import Path

import pytest

from lightning_sv.__main__ import main
from lightning_sv.cli.names import resolve_names
from lightning_sv.lit.run_arguments import parse_run
from tests.conftest import argv, config_args

BASE = ["base", "optim/adamw", "schedule/cos", "trainer/cpu"]


def stems(words: list[str]) -> list[str]:
    """Return the words with `optim/adamw` for the path of a config file in conf/."""
    stems = []
    for word in words:
        path = Path(word)
        if path.suffix == ".yaml" and "conf" in path.parts:
            place = path.parts.index("conf") + 1
            word = str(Path(*path.parts[place:-1], path.stem))
        stems.append(word)
    return [word for word in stems if word != "--config"]


TEXT = ["--data.corpus.source", "files:my notes", "--data.corpus.dir", "data/my_notes"]
OWN = ["data/my_notes/corpus.yaml", "--data.corpus.dir", "data/my_notes"]
LETTERS_TEXT = ["--data.corpus.source", "files:letters", "--data.corpus.dir", "data/letters"]
LETTERS = ["data/letters/corpus.yaml", "--data.corpus.dir", "data/letters"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--x 1", ["--x", "1"]),
        ("--model tiny", [*BASE, "data/stdlib", "model/tiny"]),
        (
            "--a b --model=tiny --scale llama --probes=copying --c",
            [
                *argv("--a b"),
                *BASE,
                *("data/stdlib", "model/tiny", "probes/copying"),
                *argv("--model.scale llama --c"),
            ],
        ),
        ("--model tiny --data './my notes/'", [*BASE, "model/tiny", *OWN]),
        ("--config x --data letters", ["x", *LETTERS]),
        (
            "--model tiny --config x --scale hg",
            [*BASE, "data/stdlib", "model/tiny", "x", *argv("--model.scale hg")],
        ),
        ("--data data/letters", LETTERS),
        ("--data out/old/", ["out/old/corpus.yaml", "--data.corpus.dir", "out/old"]),
        ("--config x --probes copying", ["x", "probes/copying"]),
        ("--model '{seed: 1}' --data x.yaml", ["--model", "{seed: 1}", "--data", "x.yaml"]),
    ],
)
def test_names_become_config_files_at_their_place(
    words: str, expected: list[str], folder: Path
) -> None:
    named = resolve_names(argv(words))
    assert stems(named.words) == expected
    assert named.parseable == named.words or stems(named.parseable) == [
        *expected[: -len(OWN)],
        *TEXT,
    ]


@pytest.mark.parametrize("path", ["letters/", "./letters"])
def test_path_of_text_is_compared_with_the_corpus_of_its_name(path: str, folder: Path) -> None:
    """The corpus data/letters may be that of a different text, such as letters.txt."""
    assert stems(resolve_names(["--data", path]).to_prepare) == [*LETTERS, *LETTERS_TEXT]
    assert stems(resolve_names(["--data", "letters"]).to_prepare) == LETTERS


def test_current_folder_of_text_has_a_corpus_of_its_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder / "my notes")
    for path in (".", "./"):
        assert resolve_names(["--data", path]).corpus.folder == Path("data/my_notes")


def test_names_are_the_settings_of_the_files() -> None:
    files = config_args(*BASE, "data/stdlib", "model/tiny")
    named = resolve_names(["--model", "tiny", "--scale", "hg+or"])
    by_files = parse_run([*files, "--model.scale", "hg+or"], check_corpus=False)
    assert parse_run(named.words, check_corpus=False) == by_files


@pytest.mark.parametrize("command", ["fit", "params", "plan", "compare", "sweep", "prepare"])
def test_help_of_a_command_shows_the_names_that_it_takes(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    name = "--data NAME" if command == "prepare" else "--model NAME"
    assert name in " ".join(capsys.readouterr().out.split())
