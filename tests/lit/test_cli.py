"""The command line: help, a command line of the user's, and the tools of Lightning that people
add."""

import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import callbacks
from torch import Tensor

from lightning_sv import PretrainCLI, PretrainModule
from lightning_sv.__main__ import main
from lightning_sv.cli.names import DEFAULTS
from lightning_sv.errors import ConfigError
from lightning_sv.lit.run_arguments import run_parser
from lightning_sv.runs.directory import read_config
from lightning_sv.runs.events import read_run
from lightning_sv.settings.sections import SECTIONS
from tests.conftest import ROOT, Refused, Told, argv
from tests.lit.own_trainer import rows
from tests.lit.test_module import OwnStep


def test_fit_help_is_short_or_complete(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    said = []
    for words in ("fit --help", "fit --help_all", "validate --help"):
        with pytest.raises(SystemExit) as end:
            main(argv(words))
        assert end.value.code == 0
        said.append(capsys.readouterr().out)
    short, full, validate = said
    assert len(short.splitlines()) <= 36 and "fit --help_all" in short
    assert validate.startswith("usage: lightning-sv validate RUN ")
    listed = set(re.findall(r"--([\w.]+)", full))
    shown = set(re.findall(r"^  --([\w.]+)", short + validate, re.MULTILINE))
    names = {*DEFAULTS, "scale"}
    assert names <= shown
    # they are read before the parser, which has the keys of a run
    read_before = {*names, "dry_run"}
    assert shown - read_before <= listed
    assert {key for key in run_parser().known_keys() if "." in key} - SECTIONS <= listed


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run the script of docs/own-trainer.md with these words; return its names."""
    page = (ROOT / "docs/own-trainer.md").read_text()
    (code,) = re.findall(r"```python\n(# train\.py.*?)```", page, re.DOTALL)
    (tmp_path / "train.py").write_text(code)

    def run(*words: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        return runpy.run_path(str(tmp_path / "train.py"), run_name="__main__")

    return run


def test_derived_cli_trains_and_validates(
    own: Callable[..., Any], run_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    short = [*argv("--trainer.max_steps 2 --data.val_sequences 4 --run_dir"), str(run)]
    names = own("fit", *run_args, *short, "--note", "hello")
    said = capsys.readouterr().out
    assert "context 32\n" in said and "sample " in said
    config = read_config(run)
    assert (
        config["note"] == "hello"
        and "context" not in config["model"]
        and (run / "summary.json").is_file()
    )
    last = str(run / "checkpoints/last.ckpt")
    restored = names["MyModule"].load_from_checkpoint(last, weights_only=True)
    assert (restored.hparams.context, restored.settings.backbone.d_model) == (32, 32)
    own("validate", "--config", str(run / "config.yaml"), "--ckpt_path", last)
    assert "val/loss" in capsys.readouterr().out


def test_cli_with_an_own_optimizer_records_no_rate_of_the_settings(
    run_args: list[str], tmp_path: Path, refused: Refused
) -> None:
    run = tmp_path / "run"
    PretrainCLI(OwnStep, args=["fit", *run_args, "--trainer.max_steps", "2", "--run_dir", str(run)])
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["lr"], summary["own_optimizer"]) == (None, "OwnStep")
    assert "OwnStep" in (run / "hparams.yaml").read_text()
    config = run / "config.yaml"
    assert read_config(run)["model_class"] == "OwnStep"
    for command in ("fit", "validate"):
        said = refused(command, "--config", str(config))
        assert "model_class" in said and "script" in said
    again = ["fit", "--config", str(config), "--run_dir", str(run), "--ckpt_path", "last"]
    with pytest.raises(ConfigError, match="model_class"):
        PretrainCLI(OwnLoss, args=again)
    config.write_text(
        config.read_text().replace("model_class: OwnStep\n", "")
    )  # of an earlier version
    assert PretrainCLI(OwnStep, args=again).summary == summary
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    assert "learning rate" not in (tmp_path / "out/README.md").read_text()


OWN = """
from torch.optim import RMSprop
from lightning_sv.scale import Placement

BNP = Placement(True, True, False, "before, normalized")

def rms(groups, config, lr):
    return RMSprop([group.options("rms", config.weight_decay) for group in groups], lr=lr)

def bare(groups, config, lr):
    members = [[member.parameter for member in group.members] for group in groups]
    return RMSprop([{"params": parameters} for parameters in members], lr=lr)

def linear(step, total_steps, config):
    return 1 - step / total_steps
"""


def test_names_of_your_own_module_train_resume_and_generate(
    run_args: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    told: Told,
    refused: Refused,
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_ideas.py").write_text(OWN)
    names = argv("--model.schedule.name my_ideas:linear --model.optim.lr 0.01")
    names += [
        "--model.scale_options.placement_at",
        "{lm_head: my_ideas:BNP}",
        "--trainer.max_steps",
        "2",
    ]
    assert "without role or kind" in refused(
        "fit", *run_args, *names, "--model.optim.name", "my_ideas:bare"
    )
    assert not [*Path("runs").glob("*/*")]
    run = tmp_path / "run"
    said = told(
        "fit", *run_args, *names, "--model.optim.name", "my_ideas:rms", "--run_dir", str(run)
    )
    assert f"generate {run} --trust_module my_ideas" in said  # no prompt: the text is not Python
    assert " rms " in said and " adamw " not in said  # of the printed groups
    resume = [
        "fit",
        "--config",
        str(run / "config.yaml"),
        "--ckpt_path",
        str(run / "checkpoints/last.ckpt"),
    ]
    assert main(resume) == 0
    assert "--trust_module my_ideas" in refused("generate", str(run))
    assert main(["generate", str(run), "--trust_module", "my_ideas"]) == 0


class OwnLoss(PretrainModule):
    def validation_step(self, block: Tensor, batch_idx: int) -> None:
        self.log("val/own", self.loss(block)[0])


def test_cli_without_val_loss_keeps_the_events(run_args: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="val/loss"):
        PretrainCLI(
            OwnLoss,
            args=["fit", *run_args, "--trainer.max_steps", "2", "--run_dir", str(tmp_path / "run")],
        )
    assert list((tmp_path / "run").glob("*tfevents*"))


class HalfResidual(PretrainModule):
    """A model with the weights of the backbone and a different function."""

    def configure_model(self) -> None:
        if self.backbone is not None:
            return
        super().configure_model()
        for layer in self.net.layers:
            layer.register_forward_hook(lambda layer, inputs, output: (0.5 * output[0], output[1]))


def test_cli_with_an_own_model_is_not_read_as_the_backbone(
    run_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: Refused
) -> None:
    run = tmp_path / "run"
    last = ["--ckpt_path", str(run / "checkpoints/last.ckpt")]
    PretrainCLI(
        HalfResidual, args=["fit", *run_args, "--trainer.max_steps", "2", "--run_dir", str(run)]
    )
    said = capsys.readouterr().out
    assert "the model is that of HalfResidual" in said and "generate" not in said
    loss = json.loads((run / "summary.json").read_text())["val_loss"]
    commands = (
        ["generate", str(run)],
        ["export", str(run), str(tmp_path / "out")],
        ["validate", *run_args, *last],
        ["fit", *run_args, *last],
    )
    for words in commands:
        assert "that of HalfResidual" in refused(*words)
    PretrainCLI(HalfResidual, args=["validate", "--config", str(run / "config.yaml"), *last])
    assert f"val/loss {loss:.4f}" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_derived_cli_help_names_the_commands(
    word: str, own: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        own(word)
    said, errors = capsys.readouterr()
    assert (end.value.code, errors) == (0, "")
    assert said.startswith("usage: train.py {fit,validate} --config FILE")


@pytest.mark.parametrize("words", [[], ["--config", "tiny-unified", "fit"]])
def test_derived_cli_without_a_command_prints_the_usage(
    words: list[str], own: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        own(*words)
    said = capsys.readouterr().err
    assert end.value.code == 2
    assert "train.py {fit,validate} --config" in said


def test_derived_cli_takes_no_names(
    own: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        own("fit", "--help")
    help_text = capsys.readouterr().out
    with pytest.raises(SystemExit):
        own("fit")
    error = capsys.readouterr().err
    assert "--config FILE" in error
    assert "--model NAME" not in help_text + error


WRONG = [
    [],
    ["train"],
    ["fit", "--note"],
    ["fit", "--model.context", "3"],
    ["fit", "--run_dir", "train.py/run"],
]


@pytest.mark.parametrize(
    ("code", "words"), [*((2, words) for words in WRONG), (1, ["fit", "--model.optim.lr", "1e30"])]
)
def test_derived_cli_wrong_words_or_failed_run_are_one_error(
    code: int,
    words: list[str],
    own: Callable[..., Any],
    run_args: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        own(*words[:1], *run_args[: len(words) * 100], *words[1:])
    said = capsys.readouterr().err
    assert end.value.code == code and said.count("error: ") == 1 and "Traceback" not in said
    assert code == 1 or (said.startswith("error: ") and said.count("\n") == 1)


def test_cli_called_from_python_raises(run_args: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"model\.optim\.lr"):
        PretrainCLI(PretrainModule, args=["fit", *run_args, "--model.optim.lr", "nan"])


CALLBACKS = callbacks.__name__


def test_fit_tools_of_lightning_work(
    run_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "more.yaml").write_text(f"""
trainer:
  max_steps: 4
  max_time: "00:12:00:00"
  precision: bf16-mixed
  profiler: simple
  logger:
    class_path: lightning.pytorch.loggers.CSVLogger
    init_args: {{save_dir: {tmp_path / "csv"}}}
  callbacks:
  - class_path: {CALLBACKS}.ModelCheckpoint
    init_args: {{dirpath: {tmp_path / "best"}, monitor: val/loss, save_top_k: 1, filename: best}}
  - class_path: {CALLBACKS}.LearningRateMonitor
  - class_path: {CALLBACKS}.EarlyStopping
    init_args: {{monitor: val/loss}}
""")
    args = ["--config", str(tmp_path / "more.yaml"), "--run_dir", str(tmp_path / "run")]
    assert main(["fit", *run_args, *args]) == 0
    said = capsys.readouterr().err
    assert (
        "warning: trainer.callbacks: EarlyStopping" in said and "warning: trainer.max_time" in said
    )
    run = read_run(tmp_path / "run")
    logged = [row for row in rows(tmp_path / "csv") if row["train/loss"]]
    assert [int(row["step"]) for row in logged] == [1, 2, 3, 4]
    assert [float(row["train/loss"]) for row in logged] == pytest.approx(
        run.curve("train/loss").values, rel=1e-6
    )
    assert (tmp_path / "best/best.ckpt").is_file() and (
        tmp_path / "run/checkpoints/last.ckpt"
    ).is_file()
    assert [name for name in run.curves if name.startswith("lr-")]
