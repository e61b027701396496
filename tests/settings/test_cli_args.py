"""Unusual arguments: numbers out of range, bytes that are not text, terminals with a different encoding."""

import io
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from lightning_sv.cli import generate
from lightning_sv.cli import main as command
from lightning_sv.lit.summary import print_summary
from lightning_sv.settings.parse import parse_run
from lightning_sv.settings.trainer import check_trainer_keys
from tests.conftest import thinned
from tests.test_imports import CONFIG

main = command.main


OUT_OF_RANGE = [
    *(
        (["fit", *CONFIG, f"--{key}", value], key)
        for value in ("1e309", ".inf", ".nan")
        for key in ("model.optim.lr", "model.optim.weight_decay", "trainer.gradient_clip_val", "model.tokens_per_param")
    ),
    (["plan", "--gpus", "1", *CONFIG, "--gpu_memory", "inf"], "--gpu_memory"),
    (["plan", "--gpus", "1", *CONFIG, "--mfu", "nan"], "--mfu"),
    (["plan", "--gpus", "1e3", *CONFIG], "--gpus"),
    *(
        (["plan", "--gpus", "1", *CONFIG, f"--{key}={value}"], key)
        for value in ("-1", "1" + "0" * 20)
        for key in ("data.seed", "model.seed")
    ),
    (["compare", "--a", "nop", "--b", "hg", "--seeds", "1" + "0" * 20], "--seeds"),
    (["compare", "--a", "nop", "--b", "hg", "--jobs", "1" + "0" * 5000], "--jobs"),
    (["sweep", "--scale", "hg", "--lr", "0.1", "nan"], "--lr"),
    (["sweep", "--scale", "hg", "--lr", "0.1", "--seeds", "9" * 9], "--seeds"),
    (["generate", "r", "--temperature", "nan"], "--temperature"),
    (["generate", "r", "--seed", "-1"], "--seed"),
    (["generate", "r", "--tokens", "9" * 30], "--tokens"),
]


@pytest.mark.parametrize(
    ("words", "key"),
    thinned(OUT_OF_RANGE, OUT_OF_RANGE[::3], several=True),
)  # fmt: skip
def test_a_number_out_of_range_is_refused(words: list[str], key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    said = capsys.readouterr().err
    assert f"{key} is " in said and "expected" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [("gradient_clip_val", "-1"), ("gradient_clip_val", "-1e-9"), ("max_steps", "0"), ("max_steps", "-2")],
)
def test_a_trainer_key_out_of_range_is_refused(key: str, value: str) -> None:
    _, _, trainer = parse_run([*CONFIG, "--trainer.accelerator", "cpu", f"--trainer.{key}={value}"], check_corpus=False)
    with pytest.raises(ValueError, match=rf"^trainer\.{key} is "):
        check_trainer_keys(trainer)


@pytest.mark.parametrize(
    "words", thinned([["fit"], ["plan", "--gpus", "1"], ["compare", "--a", "nop", "--b", "hg"]], [["fit"]])
)
def test_fit_arguments_unknown_option_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, *CONFIG, "--optimizer", "AdamW"]) == 2
    assert "--optimizer" in capsys.readouterr().err


@pytest.mark.parametrize("name", thinned(sorted(command.COMMANDS), ["fit", "report"]))
def test_every_command_takes_traceback(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--traceback shows the source of an error above its sentence; the exit code is the same."""
    for words in ([name, "--traceback", "--no_such_option"], ["--traceback", name, "--no_such_option"]):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert said.startswith("Traceback") and said.splitlines()[-1].startswith("error: ")
        assert "--traceback" not in said.splitlines()[-1]


def test_a_prompt_of_other_bytes_is_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = []
    monkeypatch.setattr(generate, "read_run", lambda *args, **more: type("Run", (), {"seq_len": 8}))
    monkeypatch.setattr(generate, "load_trained", lambda *args: (None, None))
    monkeypatch.setattr(
        generate, "generate", lambda model, tokenizer, prompt, *args, **more: prompts.append(prompt) or ""
    )
    assert main(["generate", "r", "--prompt", "a\udcff\udc80ü"]) == 0
    assert prompts == ["a\ufffd\ufffdü"] and capsys.readouterr().out == "a\ufffd\ufffdü\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_of_another_encoding_loses_no_text(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr(command, "_command", lambda name: lambda argv: print("before λ→ after") or 0)
    assert main(["generate", "r"]) == 0
    out.flush()
    said = out.buffer.getvalue().decode(encoding)
    assert said.startswith("before ") and said.endswith(" after\n")


def test_printed_commands_are_words_of_a_shell(tmp_path: Path) -> None:
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
