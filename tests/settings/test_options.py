"""The words of the command line: both spellings, wrong values, bytes that are not text; and the
Trainer's keys."""

import inspect
import io
import shlex
from pathlib import Path

import lightning as L
import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_sv.__main__ import main
from lightning_sv.cli import main as cli
from lightning_sv.errors import ConfigError
from lightning_sv.lit.run_arguments import parse_run
from lightning_sv.lit.summary import suggestions
from lightning_sv.settings.plain_parser import PlainParser
from lightning_sv.settings.trainer import (
    REFUSED_CALLBACKS,
    REFUSED_EVERYWHERE,
    TRAINER_ARGUMENTS,
    TRAINER_DEFAULTS,
    check_trainer_keys,
)
from tests.conftest import CONFIG, ROOT, Answer, Refused, Told, argv, thinned
from tests.test_results_pages import table


class AbsentLogger(CSVLogger):
    """Needs a package that is not installed."""

    def __init__(self, n: int = 1) -> None:
        raise ModuleNotFoundError("No module named 'absent'")


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
ABSENT = f"{__name__}.AbsentLogger"
FIT = ["fit", *CONFIG]
DRY = [*FIT, "--dry_run"]
PLAN = ["plan", "--gpus", "1", *CONFIG]
COMPARE = argv("compare --baseline nop --arms hg")
SWEEP = argv("sweep --scale hg --lr 0.1")
GENERATE = ["generate", "r"]
#: a corpus that does not exist, of a complete config
ABSENT_CORPUS = f"{shlex.join(CONFIG)} --data.corpus.dir no_corpus"
WITHOUT_CONFIG = (
    "fit",
    "fit --trainer cpu",
    "params",
    "plan --gpus 1",
    "compare --baseline llama --arms nop",
)
#: command, wrong words, and what the error names
WRONG: list[tuple[list[str], str, str]] = [
    (FIT, "--model.lr 0.1", "model.optim.lr"),
    (FIT, "--lr 0.1", "model.optim.lr"),
    (FIT, "--seed 1", "seed_everything"),
    (DRY, "--trainer.max_step 3", "trainer.max_steps"),  # no abbreviation
    (DRY, "--trainer.max_steps '${data.seq_len}' --trainer.max_step 3", "'trainer.max_steps'"),
    (DRY, "--data.seq_len", "argument --data.seq_len"),
    (DRY, "--model.optim '{weight_deacy: 1}'", "model.optim.weight_decay"),
    (FIT, "--model.optim.lr nan", "model.optim.lr"),
    (DRY, "--data.seq_len x", "data.seq_len is 'x'"),
    (FIT, "--model.optim.name math:pi --model.optim.lr 1", "model.optim.name"),
    (DRY, "--model.compile all", "model.compile is all"),
    (DRY, "--trainer.gradient_clip_val x", "trainer.gradient_clip_val is 'x'"),
    (DRY, "--model.scale unifed", "unifed"),
    (FIT, "--trainer.callbacks no_module.C", "No module named 'no_module'.\n"),
    (
        PLAN,
        "--trainer.callbacks '[{class_path: json.Absent}]'",
        "trainer.callbacks is json.Absent;",
    ),
    (PLAN, "--trainer.strategy.init_args.timeout 1", "expected trainer.strategy.class_path."),
    (FIT, "--trainer.accelerator gpu", "trainer: "),
    (FIT, "--seed_everything -3", "seed_everything"),
    (FIT, "--seed_everything true", "seed_everything is True"),  # Lightning's 0 for every run
    (FIT, "--seed_everything false", "seed_everything is False"),
    (FIT, "--seed_everything x", "seed_everything is x;"),
    (FIT, "--trainer null", "trainer"),
    (FIT, "--model.optim ''", "--model.optim"),
    (FIT, "--trainer '{max_steps: 1, max_steps: 2}'", "--trainer"),
    (FIT, f"--trainer.logger {ABSENT}", "absent"),
    (FIT, f"--trainer.logger {ABSENT} --trainer.logger.n x", "trainer.logger"),
    (
        FIT,
        "--trainer.plugins lightning.pytorch.plugins.MixedPrecision"
        " --trainer.plugins.precision bf16-mixed --trainer.plugins.device cpu",
        "trainer.plugins is MixedPrecision",
    ),
    (FIT, "--trainer.gradient_clip_val=.inf", "trainer.gradient_clip_val"),
    (FIT, "--trainer.gradient_clip_val=-1e-9", "trainer.gradient_clip_val"),
    (FIT, "--trainer.max_steps=0", "trainer.max_steps"),
    (PLAN, "--gpu_memory=inf", "--gpu_memory"),
    (PLAN, "--gpu H999", "h100"),
    (PLAN, "--model.backbone.name mine", "model.optim.lr"),
    (PLAN, "--model.seed=1" + "0" * 20, "model.seed"),
    (PLAN, "--optimizer=AdamW", "--optimizer"),
    (COMPARE, "--jobs=1" + "0" * 5000, "--jobs"),
    (["paper"], "--data.seed 1 --seeds 3 --no_train", "paper: --seeds is"),
    (SWEEP, "--seeds=999999999", "--seeds"),
    (GENERATE, "--temperature=nan", "--temperature"),
    (GENERATE, "--seed=-1", "--seed"),
    # before the corpus is read, which does not exist
    (COMPARE, f"--model.backbone.nope 3 {ABSENT_CORPUS}", "model.backbone.nope"),
    (argv("compare --baseline llama --arms typo"), ABSENT_CORPUS, "typo"),
    (argv("sweep --scale typo --lr 1e-3 2e-3 3e-3"), ABSENT_CORPUS, "typo"),
    (argv("sweep --scale llama"), ABSENT_CORPUS, "--lr"),
    (argv("sweep --scale llama --lr -1 2 3"), ABSENT_CORPUS, "lr"),
    # without a config
    *((argv(command), "", "--model NAME") for command in WITHOUT_CONFIG),
    (["train"], "", "fit"),
    (["fit"], "--config llama-1", "llama-1b"),
    (["fit"], "--config runs/no_such_run/config.yaml", "no_such_run"),
    (["generate"], "README.md", "README.md"),
]


@pytest.mark.parametrize(("command", "words", "named"), thinned(WRONG, WRONG[::2], several=True))
def test_wrong_words_are_refused_by_their_key(
    command: list[str],
    words: str,
    named: str,
    refused: Refused,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("conf", "README.md"):  # of a repository without a corpus
        (tmp_path / name).symlink_to(ROOT / name)
    said = refused(*command, *argv(words))
    assert named in said and said.count("error: ") == 1 and "no_corpus" not in said


#: wrong words of a command with a corpus that does not exist yet, and what the error names
WRONG_WITH_NEW_CORPUS = [
    (COMPARE, "--model tiny --dry_run", "compare: --dry_run is"),
    (COMPARE, "--model tiny --b_args '--model.optim.learning_rate 1'", "learning_rate"),
    (SWEEP, "--model tiny --dry_run", "sweep: --dry_run is"),
    (SWEEP, "--model tiny --data.seq_len x", "data.seq_len is 'x'"),
    (["fit"], "--model tiny --data.seq_len x", "data.seq_len is 'x'"),
]


@pytest.mark.parametrize(("command", "words", "named"), WRONG_WITH_NEW_CORPUS)
def test_wrong_words_are_refused_before_a_corpus_is_prepared(
    command: list[str],
    words: str,
    named: str,
    refused: Refused,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    said = refused(*command, *argv(words))
    assert named in said and said.count("error: ") == 1
    assert not list(tmp_path.iterdir())


def test_every_argument_of_the_trainer_is_followed_or_refused() -> None:
    """The table has each argument of this version of Lightning, and docs/own-trainer.md shows
    it."""
    assert set(TRAINER_ARGUMENTS) == set(inspect.signature(L.Trainer).parameters)
    defaults = DEFAULTS_OF_TRAINER
    check_trainer_keys(defaults)
    shown = table("own-trainer", "| argument of the Trainer |").reset_index().to_numpy().tolist()
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
    shown = table("own-trainer", "| callback | own Trainer |").reset_index().to_numpy().tolist()
    for (name, reason), row in zip(REFUSED_CALLBACKS.items(), shown, strict=True):
        own = "refused" if name in REFUSED_EVERYWHERE else "works"
        expected = [name, own, "refused", reason.replace("`", "")]
        assert [cell.replace("`", "") for cell in row] == expected


@pytest.mark.parametrize("command", ["fit", "validate"])
def test_dry_run_reads_no_corpus(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([command, *argv("--dry_run --config tiny-unified")]) == 0
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
