"""The command line: help, a command line of the user's, and the tools of Lightning that people
add."""

import re
import runpy
import shlex
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
from lightning_sv.runs.directory import (
    CONFIG,
    LAST,
    SUMMARY,
    event_files,
    read_config,
    read_summary,
)
from lightning_sv.runs.events import read_run
from lightning_sv.settings.sections import SECTIONS
from lightning_sv.settings.trainer import TRAINER_ARGUMENTS
from tests.conftest import ROOT, Refused, Told, argv
from tests.lit.own_trainer import rows
from tests.lit.runs import run_fit
from tests.lit.test_module import OwnStep


def test_fit_help_is_short_or_complete(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")

    def shown(words: str) -> str:
        with pytest.raises(SystemExit) as end:
            main(argv(words))
        assert end.value.code == 0
        return capsys.readouterr().out

    short = shown("fit --help")
    full = shown("fit --help_all")
    assert len(short.splitlines()) <= 36 and "fit --help_all" in short
    pattern = re.compile(r"^  --([\w.]+)", re.MULTILINE)
    in_short = {*pattern.findall(short), *pattern.findall(shown("validate --help"))}
    in_full = set(re.findall(r"--([\w.]+)", full))
    # they are read before the parser, which has the keys of a run
    names = {*DEFAULTS, "scale"}
    assert names <= in_short and in_short - names - {"dry_run"} <= in_full
    assert {key for key in run_parser().known_keys() if "." in key} - SECTIONS <= in_full
    without_breaks = "".join(full.split())
    for key, argument in TRAINER_ARGUMENTS.items():  # and not what a Trainer of your own does
        assert "".join(argument.note.split()) in without_breaks, key


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
    short = f"--trainer.max_steps 2 --data.val_sequences 4 --run_dir {run} --note hello"
    names = own("fit", *run_args, *argv(short))
    said = capsys.readouterr().out
    assert "context 32\n" in said and "sample " in said
    config = read_config(run)
    assert config["note"] == "hello" and "context" not in config["model"]
    assert (run / SUMMARY).is_file()
    restored = names["MyModule"].load_from_checkpoint(run / LAST, weights_only=True)
    assert (restored.hparams.context, restored.settings.backbone.d_model) == (32, 32)
    own(*argv(f"validate --config {run / CONFIG} --ckpt_path {run / LAST}"))
    assert "val/loss" in capsys.readouterr().out
    again = tmp_path / "again"  # as the refusal of trainer.enable_progress_bar advises
    own("fit", *run_args, *argv(f"--trainer.max_steps 2 --run_dir {again} --quiet"))
    assert "step 1/2" in said and "step 1/2" not in capsys.readouterr().out


def test_cli_with_an_own_optimizer_records_no_rate_of_the_settings(
    run_args: list[str], tmp_path: Path, refused: Refused
) -> None:
    run = tmp_path / "run"
    fit = ["fit", *run_args, *argv(f"--trainer.max_steps 2 --run_dir {run}")]
    PretrainCLI(OwnStep, args=fit)
    summary = read_summary(run)
    assert (summary["lr"], summary["own_optimizer"]) == (None, "OwnStep")
    assert "OwnStep" in (run / "hparams.yaml").read_text()
    config = run / CONFIG
    assert read_config(run)["model_class"] == "OwnStep"
    for command in ("fit", "validate"):
        said = refused(command, "--config", str(config))
        assert "model_class" in said and "script" in said
    again = argv(f"fit --config {config} --run_dir {run} --ckpt_path last")
    with pytest.raises(ConfigError, match="model_class"):
        PretrainCLI(OwnLoss, args=again)
    # without the key, which is then that of the command line
    config.write_text(config.read_text().replace("model_class: OwnStep\n", ""))
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
    names = "--model.schedule.name my_ideas:linear --model.optim.lr 0.01 --trainer.max_steps 2"
    fit = ["fit", *run_args, *argv(names)]
    fit += ["--model.scale_options.placement_at", "{lm_head: my_ideas:BNP}"]
    assert "without role or kind" in refused(*fit, "--model.optim.name", "my_ideas:bare")
    assert not [*Path("runs").glob("*/*")]
    said = told(*fit, *argv("--model.optim.name my_ideas:rms --run_dir run"))
    # no prompt: the text is not Python
    assert "generate run --trust_module my_ideas" in said
    assert " rms " in said and " adamw " not in said  # of the printed groups
    assert main(argv(f"fit --config run/{CONFIG} --ckpt_path run/{LAST}")) == 0
    assert "--trust_module my_ideas" in refused("generate", "run")
    assert main(argv("generate run --trust_module my_ideas")) == 0


class OwnLoss(PretrainModule):
    def validation_step(self, block: Tensor, batch_idx: int) -> None:
        self.log("val/own", self.loss(block)[0])


def test_cli_without_val_loss_keeps_the_events(run_args: list[str], tmp_path: Path) -> None:
    words = argv(f"--trainer.max_steps 2 --run_dir {tmp_path / 'run'}")
    with pytest.raises(ConfigError, match="val/loss"):
        PretrainCLI(OwnLoss, args=["fit", *run_args, *words])
    assert event_files(tmp_path / "run")


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
    last = ["--ckpt_path", str(run / LAST)]
    fit = ["fit", *run_args, *argv(f"--trainer.max_steps 2 --run_dir {run}")]
    PretrainCLI(HalfResidual, args=fit)
    said = capsys.readouterr().out
    assert "the model is that of HalfResidual" in said and "generate" not in said
    commands = (
        ["generate", str(run)],
        ["export", str(run), str(tmp_path / "out")],
        ["validate", *run_args, *last],
        ["fit", *run_args, *last],
    )
    for words in commands:
        assert "that of HalfResidual" in refused(*words)
    PretrainCLI(HalfResidual, args=["validate", "--config", str(run / CONFIG), *last])
    loss = read_summary(run)["val_loss"]
    assert f"val/loss {loss:.4f}" in capsys.readouterr().out


USAGE = "train.py {fit,validate} --config FILE"


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ("-h", 0, f"usage: {USAGE}"),
        ("fit --help", 0, "--config FILE"),
        ("", 2, USAGE),
        ("train RUN", 2, USAGE),
        ("fit", 2, "--config FILE"),
        ("fit RUN --model.context 3", 2, "context"),
        ("fit RUN --run_dir train.py/run", 2, "train.py/run"),
        ("fit RUN --model.optim.lr 1e30", 1, "finite"),
    ],
)
def test_derived_cli_prints_its_help_or_one_error(
    words: str,
    code: int,
    text: str,
    own: Callable[..., Any],
    run_args: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        own(*argv(words.replace("RUN", shlex.join(run_args))))
    out, errors = capsys.readouterr()
    assert end.value.code == code
    assert text in (errors if code else out)
    assert errors.count("error: ") == (code > 0) and "Traceback" not in errors
    assert code != 2 or (errors.startswith("error: ") and errors.count("\n") == 1)
    assert "--model NAME" not in out + errors  # a script takes no names


def test_cli_called_from_python_raises(run_args: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"model\.optim\.lr"):
        PretrainCLI(PretrainModule, args=["fit", *run_args, "--model.optim.lr", "nan"])


CALLBACKS = callbacks.__name__


def test_fit_tools_of_lightning_work(
    run_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = tmp_path / "more.yaml"
    more.write_text(f"""
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
    init_args: {{dirpath: {tmp_path / "best"}, monitor: val/loss, save_last: true, filename: best}}
  - class_path: {CALLBACKS}.LearningRateMonitor
  - class_path: {CALLBACKS}.EarlyStopping
    init_args: {{monitor: val/loss}}
""")
    assert run_fit([*run_args, "--config", str(more)], tmp_path / "run") == 0
    said = capsys.readouterr().err
    assert "warning: trainer.callbacks: EarlyStopping" in said
    assert "warning: trainer.max_time" in said
    run = read_run(tmp_path / "run")
    logged = [row for row in rows(tmp_path / "csv") if row["train/loss"]]
    assert [int(row["step"]) for row in logged] == [1, 2, 3, 4]
    losses = [float(row["train/loss"]) for row in logged]
    assert losses == pytest.approx(run.curve("train/loss").values, rel=1e-6)
    assert (tmp_path / "best/best.ckpt").is_file() and (run.dir / LAST).is_file()
    assert any(name.startswith("lr-") for name in run.curves)
