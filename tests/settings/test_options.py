"""The words of the command line: both spellings, and bytes that are not text; the Trainer's keys."""

import inspect
import io
import shlex
from pathlib import Path

import lightning as L
import pytest
import yaml

from lightning_sv.__main__ import main
from lightning_sv.cli import main as cli
from lightning_sv.errors import ConfigError
from lightning_sv.lit.run_arguments import check_run, parse_run
from lightning_sv.lit.summary import suggestions
from lightning_sv.settings.plain_parser import PlainParser
from lightning_sv.settings.trainer import (
    REFUSED_CALLBACKS,
    REFUSED_EVERYWHERE,
    TRAINER_ARGUMENTS,
    TRAINER_DEFAULTS,
    check_trainer_keys,
)
from tests.conftest import CONFIG, ROOT, Answer, Told, argv, thinned
from tests.test_results_pages import table


def test_parsers_both_spellings_are_one_option(told: Told) -> None:
    """Of plain parsers and of jsonargparse's, in a name alone, before '=', and in a dotted key."""
    plan = "--gpus 1 --gpu H100 --gpu_memory=80 --trainer.max_steps 3 --scalars.every_n_steps 2"
    params = "--model.backbone.n_layer=3 --seed_everything 1"
    said = []
    for a in ("_", "-"):
        for command, words in (("plan", plan), ("params", params)):
            said.append(told(command, *argv(words.replace("_", a)), *CONFIG, "--json"))
    assert said[:2] == said[2:] and '"steps": 3' in said[0]
    words = argv("--data.global_batch 4 --trainer.max-steps=-1 --trainer.max-epochs 7")
    _, data, trainer = parse_run([*CONFIG, *words], check_corpus=False)
    assert (data.global_batch, trainer["max_steps"], trainer["max_epochs"]) == (4, -1, 7)


#: arguments of the Trainer of a config that sets none
DEFAULTS_OF_TRAINER = {
    key: parameter.default for key, parameter in inspect.signature(L.Trainer).parameters.items()
} | TRAINER_DEFAULTS


def test_every_argument_of_the_trainer_is_followed_or_refused() -> None:
    """The table has each argument of this version of Lightning, and docs/own-trainer.md shows
    it."""
    assert set(TRAINER_ARGUMENTS) == set(inspect.signature(L.Trainer).parameters)
    defaults = DEFAULTS_OF_TRAINER
    check_trainer_keys(defaults)
    shown = table("own-trainer", "argument of the Trainer").reset_index().to_numpy().tolist()
    for (key, argument), row in zip(TRAINER_ARGUMENTS.items(), shown, strict=True):
        treatment = "followed" if argument.is_followed else "refused"
        assert row == [key, treatment, argument.note]
        if argument.is_followed:
            continue
        for value in argument.accepted:
            check_trainer_keys(defaults | {key: value})
        with pytest.raises(ConfigError, match=f"^trainer.{key} is "):
            check_trainer_keys(defaults | {key: "a different value"})


def test_own_trainer_page_lists_the_refused_callbacks() -> None:
    shown = table("own-trainer", "callback", "own Trainer").reset_index().to_numpy().tolist()
    for (name, reason), row in zip(REFUSED_CALLBACKS.items(), shown, strict=True):
        own = "refused" if name in REFUSED_EVERYWHERE else "works"
        expected = [name, own, "refused", reason.replace("`", "")]
        assert [cell.replace("`", "") for cell in row] == expected


@pytest.mark.parametrize("words", ["fit --dry_run --json", "validate --dry_run"])
def test_dry_run_reads_no_corpus(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(argv(f"{words} --config tiny-unified")) == 0
    assert list(tmp_path.iterdir()) == []


def test_print_config_is_that_of_a_run_without_a_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="0"):
        main(argv("fit --model tiny --print_config"))
    assert {"run_dir", "checkpoint"} <= yaml.safe_load(capsys.readouterr().out).keys()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", thinned(sorted(cli.COMMANDS), ["fit", "report"]))
def test_main_traceback_shows_the_source_above_the_sentence(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (f"{name} --traceback --no_such_option", f"--traceback {name} --no_such_option"):
        assert main(argv(words)) == 2
        said = capsys.readouterr().err
        last = said.splitlines()[-1]
        assert said.startswith("Traceback") and last.startswith("error: ")
        assert "--traceback" not in last


def test_plain_parser_text_of_other_bytes_is_replaced() -> None:
    parser = PlainParser("generate", "")
    parser.add_argument("--prompt")
    assert parser.parse_args(["--prompt", "a\udcff\udc80ü"]).prompt == "a\ufffd\ufffdü"


def test_main_terminal_of_another_encoding_loses_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr(cli, "_command", lambda name: lambda argv: print("before λ→ after") or 0)
    assert main(["generate", "r"]) == 0
    out.flush()
    said = out.buffer.getvalue().decode("ascii")
    assert said.startswith("before ") and said.endswith(" after\n")


def test_suggestions_are_words_of_a_shell(tmp_path: Path) -> None:
    """Whatever a folder is called."""
    folder = tmp_path / "my runs;$x" / "it's"
    shown = suggestions({"label": "hg+dp+my_module:X"}, folder)
    sample = shlex.split(shown["sample"])
    assert str(folder) in sample and sample[-2:] == ["--trust_module", "my_module"]
    assert str(folder.parent) in shlex.split(shown["charts"])


def test_check_trainer_keys_one_batch_is_not_all_of_them() -> None:
    """1 == 1.0, but Lightning's 1 is one batch. Parsers of one process may also read 1 as 1.0, so
    none is used here."""
    given = DEFAULTS_OF_TRAINER
    check_trainer_keys(given | {"limit_val_batches": 1.0})
    with pytest.raises(ConfigError, match="limit_val_batches"):
        check_trainer_keys(given | {"limit_val_batches": 1})


def test_check_run_leaves_warnings_to_the_run_itself(caplog: pytest.LogCaptureFixture) -> None:
    check_run([*CONFIG, *argv("--trainer.max_time 00:00:01:00")])
    assert not caplog.records


def test_presets_are_listed_and_are_configs(
    answer: Answer, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    names = ["base"]
    for path in (ROOT / "conf").glob("*/*.yaml"):
        if path.parent.name not in ("paper", "tuned"):
            names.append(path.stem)
    found = answer("presets")
    assert sorted(names) == sorted(found)  # each name is that of one file
    listed = told("presets")
    assert all(name in listed for name in found)
    layers = "--config base --config adamw --config cos --config cpu --config stdlib"
    run = parse_run([*argv(layers), "--config", "llama-1b"], check_corpus=False).model
    assert run.backbone.name == "llama-1b"
