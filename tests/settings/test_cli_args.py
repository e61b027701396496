"""Unusual arguments: numbers out of range, bytes that are not text, terminals with a different encoding."""

import io
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from lightning_sv.cli import main as command
from lightning_sv.lit.summary import print_summary
from lightning_sv.settings.parse import parse_run
from lightning_sv.settings.plain_parser import PlainParser
from lightning_sv.settings.trainer import check_trainer_keys
from tests.conftest import CONFIG, Refused, thinned

main = command.main
PLAN = ["plan", "--gpus", "1", *CONFIG]
COMPARE = ["compare", "--a", "nop", "--b", "hg"]
SWEEP = ["sweep", "--scale", "hg", "--lr", "0.1"]
#: key or option -> its value and the words before it
OUT_OF_RANGE = [
    ("--model.optim.lr", ".nan", ["fit", *CONFIG]),
    ("--model.optim.weight_decay", "1e309", ["fit", *CONFIG]),
    ("--trainer.gradient_clip_val", ".inf", ["fit", *CONFIG]),
    ("--gpu_memory", "inf", PLAN),
    ("--gpus", "1e3", ["plan", *CONFIG]),
    ("--data.seed", "-1", PLAN),
    ("--model.seed", "1" + "0" * 20, PLAN),
    ("--optimizer", "AdamW", PLAN),
    ("--seeds", "1" + "0" * 20, COMPARE),
    ("--jobs", "1" + "0" * 5000, COMPARE),
    ("--seeds", "9" * 9, SWEEP),
    ("--temperature", "nan", ["generate", "r"]),
    ("--seed", "-1", ["generate", "r"]),
]


@pytest.mark.parametrize(("key", "value", "words"), thinned(OUT_OF_RANGE, OUT_OF_RANGE[::3], several=True))
def test_main_argument_out_of_range_is_refused(key: str, value: str, words: list[str], refused: Refused) -> None:
    said = refused(*words, f"{key}={value}")
    assert (
        f"{key.removeprefix('--')} is " in said.replace("=AdamW", "") and "expected" in said and said.count("\n") == 1
    )


@pytest.mark.parametrize(("key", "value"), [("gradient_clip_val", "-1e-9"), ("max_steps", "0"), ("max_steps", "-2")])
def test_check_trainer_keys_out_of_range_is_refused(key: str, value: str) -> None:
    _, _, trainer = parse_run([*CONFIG, "--trainer.accelerator", "cpu", f"--trainer.{key}={value}"], check_corpus=False)
    with pytest.raises(ValueError, match=rf"^trainer\.{key} is "):
        check_trainer_keys(trainer)


@pytest.mark.parametrize("name", thinned(sorted(command.COMMANDS), ["fit", "report"]))
def test_main_traceback_shows_the_source_above_the_sentence(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([name, "--traceback", "--no_such_option"], ["--traceback", name, "--no_such_option"]):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert said.startswith("Traceback") and said.splitlines()[-1].startswith("error: ")
        assert "--traceback" not in said.splitlines()[-1]


def test_plain_parser_text_of_other_bytes_is_replaced() -> None:
    parser = PlainParser("generate", "")
    parser.add_argument("--prompt")
    assert parser.parse_args(["--prompt", "a\udcff\udc80ü"]).prompt == "a\ufffd\ufffdü"


def test_main_terminal_of_another_encoding_loses_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr(command, "_command", lambda name: lambda argv: print("before λ→ after") or 0)
    assert main(["generate", "r"]) == 0
    out.flush()
    said = out.buffer.getvalue().decode("ascii")
    assert said.startswith("before ") and said.endswith(" after\n")


def test_print_summary_commands_are_words_of_a_shell(tmp_path: Path) -> None:
    """Whatever a folder is called."""
    out, folder = io.StringIO(), tmp_path / "my runs;$x" / "it's"
    summary = dict.fromkeys(("val_loss", "val_perplexity", "val_bits_per_byte"), 1.0) | {
        "model": "tiny", "label": "hg+dp+my_module:X", "tokens": 1, "skipped_steps": 0, "seconds": 1.0, "legs": [],
    }  # fmt: skip
    print_summary(Console(file=out, width=500), summary, folder)
    lines = {line.split()[0]: line.partition(" ")[2] for line in out.getvalue().splitlines() if line[:1].isalpha()}
    for name, word in (("sample", str(folder)), ("compare", f"{folder}/config.yaml"), ("charts", str(folder.parent))):
        words = lines[name].partition("   (or")[0]
        said = subprocess.run(["bash", "-c", f"printf '%s\\n' {words}"], capture_output=True, text=True, check=True)
        assert word in said.stdout.splitlines(), words
