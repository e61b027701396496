"""What TensorBoard shows of a run: the loss before other charts, the names of runs, and text drawn
during training."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from lightning_sv import TextSamples, TokenDataModule
from lightning_sv.corpus import Tokenizer
from lightning_sv.runs.directory import LAST, event_files
from tests.conftest import Answer, argv
from tests.lit.own_trainer import module, trainer
from tests.lit.runs import drawn_charts, run_fit, same_checkpoint, same_curves

START = "_hparams_/session_start_info"
END = "_hparams_/session_end_info"
COLUMNS = {
    "model": "tiny",
    "label": "hg+dnp+or+iwd",
    "seed": 0,
    "optimizer": "adamw",
    "schedule": "cos",
    "lr": 0.006,
    "weight_decay": 0.1,
    "init_std": 0.02,
    "steps": 12,
    "tokens": 12 * 128,
    "batch": 4,
    "seq_len": 32,
    "init_from": "",
}


def test_fit_tensorboard_has_the_loss_first_and_hparams(
    run_args: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert run_fit(run_args, run) == 0
    charts = drawn_charts(run)
    assert charts["loss: validation"] == ["val/loss"]
    assert charts["loss: training"] == ["train/loss"]
    assert next(iter(charts)).startswith("loss:")

    metadata = EventAccumulator(str(run)).Reload().SummaryMetadata(START)
    start = HParamsPluginData.FromString(metadata.plugin_data.content).session_start_info
    written = {
        key: getattr(value, str(value.WhichOneof("kind"))) for key, value in start.hparams.items()
    }
    assert COLUMNS.items() <= written.items()
    assert written.keys() == {*COLUMNS, "corpus", "parameters", "settings"}
    assert str(written["corpus"]).startswith("shards ")

    (file,) = event_files(run)
    order: list[str] = []
    for event in LegacyEventFileLoader(str(file)).Load():
        order += [value.tag for value in event.summary.value]
    assert order.index(START) < order.index("train/loss")
    assert order.count(START) == order.count(END) == 1


def test_text_samples_equal_generate_and_leave_the_run_unchanged(
    run_args: list[str], tmp_path: Path, answer: Answer
) -> None:
    silent = tmp_path / "silent"
    speaking = tmp_path / "speaking"
    prompt = "def f\n# x"
    args = [*run_args, *argv("--trainer.max_steps 4")]
    assert run_fit(args, silent) == 0
    drawn = argv("--samples.tokens 20 --samples.temperature 1.5 --samples.prompt")
    assert run_fit([*args, *drawn, prompt], speaking) == 0
    same_checkpoint(silent, speaking)
    same_curves(silent, speaking)

    words = argv(f"{speaking / LAST} --max_new_tokens 20 --temperature 1.5 --prompt")
    text = prompt + answer("generate", *words, prompt)["text"]
    first, last = EventAccumulator(str(speaking)).Reload().Tensors("sample/text_summary")
    assert (first.step, last.step) == (2 * 128, 4 * 128)
    (shown,) = last.tensor_proto.string_val
    assert shown.decode() == "".join(f"    {line}\n" for line in text.split("\n"))
    assert "sample/text_summary" not in EventAccumulator(str(silent)).Reload().Tags()["tensors"]


@pytest.mark.filterwarnings("ignore")  # Lightning warns about few workers
def test_text_samples_have_the_tokens_of_the_first_device(
    data: TokenDataModule, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each device would draw its own, because their rounding differs."""

    def broadcast(value: Any, src: int = 0) -> Any:
        return 65 if type(value) is int else value

    logger = TensorBoardLogger(tmp_path)
    run = trainer(tmp_path, TextSamples(tokens=3), logger=logger, max_steps=1, val_check_interval=1)
    monkeypatch.setattr(run.strategy, "broadcast", broadcast)
    run.fit(module(), data)
    sample = EventAccumulator(logger.log_dir).Reload().Tensors("sample/text_summary")[-1]
    text = Tokenizer.load(corpus).decode([65, 65, 65])
    assert sample.tensor_proto.string_val[0].decode() == f"    {text}\n"
