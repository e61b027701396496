"""`fit`, `validate` and `generate` in process: the files of a run, refused input, experts,
micro-batches of a GPU."""

import contextlib
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch

from lightning_sv import PretrainCLI, PretrainModule
from lightning_sv.__main__ import main
from lightning_sv.gpus import find_gpu
from lightning_sv.lit.backbone_module import BackboneModule
from lightning_sv.lit.run_arguments import parse_run
from lightning_sv.nn import Routing, router_loss
from lightning_sv.plan.micro_batch import choose_micro_batch
from lightning_sv.plan.plan import make_plan
from lightning_sv.runs.checkpoint import FORMAT, load_backbone
from lightning_sv.runs.directory import event_files, read_summary
from lightning_sv.runs.events import read_run
from tests.conftest import Answer, Refused, Told, argv, thinned, write_run_args
from tests.lit.runs import LAST, contents, drawn_charts, load, run_fit


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run that no test writes to; said.txt next to it has the output of the command."""
    folder = tmp_path_factory.mktemp("run")
    peak = mock.patch("lightning_sv.callbacks.throughput._peak_flops", return_value=1e12)
    with (folder / "said.txt").open("w") as said, contextlib.redirect_stdout(said), peak:
        assert run_fit(write_run_args(corpus, folder), folder / "run") == 0
    return folder / "run"


def test_fit_writes_summary_curves_and_a_config_that_repeats_it(
    answer: Answer, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = read_summary(run)
    expected = {"label": "hg+dnp+or+iwd", "steps": 12, "tokens": 12 * 4 * 32}
    assert expected.items() <= summary.items()
    record = read_run(run)
    tokens, losses = record.curve("train/loss")
    assert tokens.tolist() == [128 * step for step in range(1, 13)]
    assert losses[-1] < losses[0]
    tokens, validations = record.curve("val/loss")
    assert tokens.tolist() == [128 * 6, 128 * 12]
    assert validations[-1] == pytest.approx(summary["val_loss"], rel=1e-6)
    for tag in ("lr", "grad_norm", "throughput/tokens_per_s", "throughput/mfu", "memory/peak_gib"):
        assert (record.curve(tag).values > 0).all(), tag
    for branch in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        for kind in ("W", "gamma_in", "gamma_out", "effective"):
            assert record.curve(f"branch_norm/mean/{branch}/{kind}").tokens[0] == 0
    assert (run / "run.png").stat().st_size > 10_000
    out = run.with_name("said.txt").read_text()
    assert "input scale" in out and "bits per byte" in out and f"generate {run}" in out
    # the saved config starts the run again, and gives the same losses
    monkeypatch.chdir(tmp_path)
    figures = answer("fit", "--config", str(run / "config.yaml"))
    assert figures["run_dir"] == "runs/tiny/hg+dnp+or+iwd-seed0"
    assert figures["val_loss"] == summary["val_loss"]
    again = read_run(Path(figures["run_dir"]))
    assert again.curve("train/loss").values.tolist() == losses.tolist()


def test_fit_muon_under_bf16_writes_groups(run_args: list[str], tmp_path: Path) -> None:
    """With 0 for no clipping, and a budget in tokens per parameter."""
    args = argv(
        "--model.optim.name muon --model.optim.lr 0.01 --model.optim.undecayed [embedding]"
        " --trainer.num_sanity_val_steps 1 --trainer.gradient_clip_val 0 --trainer.max_steps=-1"
        " --model.tokens_per_param 0.035 --model.mask_documents true"
        " --trainer.precision bf16-mixed"
    )
    assert run_fit([*run_args, *args], tmp_path / "run") == 0
    record = read_run(tmp_path / "run")
    losses = record.curve("train/loss").values
    assert losses[-1] < losses[0] - 0.3
    assert len(losses) == record.summary["steps"] == -(-0.035 * record.summary["parameters"] // 128)
    groups = load(tmp_path / "run")["optimizer_states"][0]["param_groups"]
    kinds = {(group["kind"], group["initial_lr"]) for group in groups}
    assert kinds == {("muon", 0.01), ("adamw", 0.01)}


def test_validate_equals_fit_and_refuses_a_different_tokenizer(
    short_corpus: Path, run: Path, told: Told, refused: Refused
) -> None:
    last = argv(f"--ckpt_path {run / LAST}")
    validate = ["validate", "--config", str(run / "config.yaml"), *last]
    said = told(*validate)
    assert float(said.split()[1]) == pytest.approx(read_summary(run)["val_loss"], abs=1e-4)
    assert told("validate", str(run)) == said
    assert told("validate", str(run), *last, "--json") == told(*validate, "--json")
    assert "config.yaml" in refused("validate", str(run / "checkpoints"))
    error = refused(*validate, "--data.corpus.dir", str(short_corpus))
    assert "tokenizer_sha256 is " in error and "as in the checkpoint" in error


def test_fit_fast_dev_run_writes_nothing(run_args: list[str], tmp_path: Path) -> None:
    words = argv("--trainer.fast_dev_run true --data.micro_batch 1")
    assert run_fit([*run_args, *words], tmp_path / "dev") == 0
    assert not (tmp_path / "dev").exists()


@pytest.mark.parametrize(
    "written", thinned([FORMAT + 1, FORMAT - 1, "2", True, None], [FORMAT + 1])
)
def test_load_backbone_wrong_format_is_refused(
    written: object, run: Path, tmp_path: Path, refused: Refused
) -> None:
    checkpoint = torch.load(run / LAST, weights_only=True)
    assert checkpoint["lightning_sv"]["format"] == FORMAT
    checkpoint["lightning_sv"]["format"] = written
    later = tmp_path / "later.ckpt"
    torch.save(checkpoint, later)
    why = f"{later} is of format {written!r}"
    assert why in refused("validate", str(run), "--ckpt_path", str(later))
    with pytest.raises(ValueError, match=re.escape(why)):
        load_backbone(str(later))


def longer(run: Path, checkpoint: Path) -> list[str]:
    """Return a fit that resumes a run for more steps."""
    return argv(
        f"fit --config {run / 'config.yaml'} --ckpt_path {checkpoint} --trainer.max_steps 13"
    )


@pytest.mark.parametrize(
    "how", ["a group", "optimizer_states", "lr_schedulers", "loops", "callbacks"]
)
def test_fit_damaged_checkpoint_is_refused(
    how: str, run: Path, tmp_path: Path, refused: Refused
) -> None:
    path = shutil.copytree(run, tmp_path / "run") / LAST
    checkpoint = torch.load(path, weights_only=True)
    if how == "a group":  # that of a run in which fewer parameters were trained
        checkpoint["optimizer_states"][0]["param_groups"][0]["params"].pop()
    else:
        checkpoint[how] = 7
    torch.save(checkpoint, path)
    error = refused(*longer(run, path))
    assert "error: the checkpoint cannot be resumed" in error


class Broken(L.Callback):
    """A callback with a bug, or in which Ctrl-C is pressed."""

    def __init__(self, error: str):
        self.error = error

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.error == "bug":
            raise TypeError("a bug")

    def on_train_batch_start(self, *args: object) -> None:
        raise KeyboardInterrupt


def test_fit_resumed_with_a_bug_in_a_callback_crashes(run: Path, tmp_path: Path) -> None:
    path = shutil.copytree(run, tmp_path / "run") / LAST
    fit = [*longer(run, path), f"--trainer.callbacks+={__name__}.Broken"]
    with pytest.raises(TypeError, match="a bug"):
        main([*fit, "--trainer.callbacks.error", "bug"])
    assert main([*fit, "--trainer.callbacks.error", "Ctrl-C"]) == 130


CHANGES = [
    "--model.seed=5",
    "--model.optim.lr=1e-9",
    "--model.scale=llama",
    "--data.val_sequences=3",
    "--data.global_batch=8",
    "--trainer.gradient_clip_val=0.5",
]


@pytest.mark.parametrize("change", CHANGES)
def test_fit_resumed_with_other_settings_is_refused(
    change: str, run: Path, refused: Refused
) -> None:
    before = contents(run)
    error = refused(*longer(run, run / LAST), change)
    key = change[2:].partition("=")[0]
    assert f"{key.removeprefix('model.')} is " in error and "checkpoint" in error
    assert contents(run) == before


def test_fit_resumed_in_too_little_memory_does_not_blame_the_checkpoint(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: BackboneModule) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(BackboneModule, "configure_model", fail)
    assert main(longer(run, run / LAST)) == 1
    assert "data.micro_batch" in capsys.readouterr().err


def test_fit_wrong_length_of_a_probe_is_refused_before_any_step(
    run_args: list[str], tmp_path: Path, refused: Refused
) -> None:
    run = tmp_path / "run"
    probe = argv(
        "--trainer.callbacks=lightning_sv.callbacks.CopyingMonitor --trainer.callbacks.repeat_length 17"
    )
    assert "repeat_length" in refused("fit", *run_args, *probe, "--run_dir", str(run))
    assert not event_files(run)


def test_fit_refused_leaves_a_finished_run(
    run: Path, run_args: list[str], refused: Refused
) -> None:
    before = contents(run)
    assert "already contains a run" in refused("fit", *run_args, "--run_dir", str(run))
    assert contents(run) == before
    assert "ckpt_path is not set; expected a checkpoint" in refused("validate", *run_args)


def test_fit_max_epochs_shortens_the_run(run_args: list[str], tmp_path: Path) -> None:
    ends = argv("--trainer.max_epochs 2 --trainer.limit_train_batches 4 --data.micro_batch 2")
    assert run_fit([*run_args, *ends], tmp_path / "run") == 0
    record = read_run(tmp_path / "run")
    assert record.summary["steps"] == 4  # an epoch is two steps of two micro-batches
    assert record.curve("val/loss").tokens.tolist() == [2 * 128, 4 * 128]


class Recorded(PretrainModule):
    """Notes what its training steps return, and the loss of the routers."""

    def on_train_start(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def training_step(self, block: torch.Tensor, batch_idx: int) -> dict[str, Any]:
        out = super().training_step(block, batch_idx)
        routed = router_loss(out["routings"], self.settings.backbone)
        self.seen.append(out | {"loss": out["loss"].detach().clone(), "routed": routed})
        return out


def expected_figures(routings: Sequence[Routing]) -> dict[str, torch.Tensor]:
    """Return what `RouterMonitor` logs about the routings of one layer."""
    load_of_expert = torch.stack([routing.load for routing in routings]).sum(0)
    share = load_of_expert / load_of_expert.mean()
    figures = {f"load/expert{e}": share[e] for e in range(6)}
    figures |= {"load_max": share.max(), "load_min": share.min()}
    for name in ("balance_loss", "entropy"):
        figures[name] = torch.stack([getattr(routing, name) for routing in routings]).mean()
    return figures


@pytest.mark.parametrize("balance", thinned(["bias", "loss"], ["bias"]))
def test_fit_moe_losses_biases_and_figures_equal_the_routings(
    balance: str, run_args: list[str], tmp_path: Path
) -> None:
    """A step has two micro-batches. The oracle is the routings that the training steps return."""
    args = argv(
        "--model.backbone.n_expert 6 --model.backbone.n_expert_active 2 --data.micro_batch 2"
        f" --model.backbone.router.balance {balance} --model.backbone.router.z_coef 0.1"
        " --model.backbone.router.bias_rate 0.01 --model.optim.lr 6e-3 --trainer.max_steps 6"
        " --experts.every_n_steps 3"
    )
    fit = ["fit", *run_args, *args, "--run_dir", str(tmp_path / "run")]
    made: Any = PretrainCLI(Recorded, args=fit).model
    seen = made.seen
    assert len(seen) == 12
    charts = drawn_charts(tmp_path / "run")
    assert charts["experts: largest load"] == ["moe/layer0/load_max", "moe/layer1/load_max"]
    assert "branch_norm/mean/expert_up_proj/effective" in charts["gate, up: effective, mean"]
    for out in seen:
        torch.testing.assert_close(out["loss"], out["nats"] + out["routed"])
        assert out["routed"] > 0.1  # the z-loss of six nearly equal experts is log(6)^2 = 3.2
    record = read_run(tmp_path / "run")
    train = record.curve("train/loss").values
    means = [float(a["nats"] + b["nats"]) / 2 for a, b in zip(seen[::2], seen[1::2], strict=True)]
    assert train == pytest.approx(means, rel=1e-5)

    weights = load(tmp_path / "run")["state_dict"]
    for i in range(2):
        routings = [out["routings"][i] for out in seen]
        loads = torch.stack([routing.load for routing in routings])
        assert (loads.sum(-1) == 2 * 32 * 2).all()  # sequences, tokens, choices: none is dropped
        of_steps = loads.view(6, 2, 6).sum(1)
        key = f"backbone.layers.{i}.ffn.router_bias"
        if balance == "bias":
            moves = 0.01 * (of_steps.mean(-1, keepdim=True) - of_steps).sign()
            torch.testing.assert_close(weights[key], moves.sum(0))
        else:
            assert key not in weights
        for write, steps in enumerate((slice(0, 6), slice(6, 12))):  # two writes of three steps
            for name, value in expected_figures(routings[steps]).items():
                logged = record.curve(f"moe/layer{i}/{name}").values[write]
                assert logged == pytest.approx(float(value), rel=1e-5), name


@pytest.mark.long
def test_choose_micro_batch_of_gpu_is_largest_that_fits(
    run_args: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "--data.global_batch 60 --trainer.precision bf16-mixed --model.backbone.n_layer=1"
    run, data, trainer = parse_run([*run_args, *argv(words)])
    h200 = find_gpu("h200")
    gpu = torch.device("cuda", 0)

    def chosen(
        memory: int, devices: int = 1, given: int | None = None, **changes: str
    ) -> int | None:
        properties = SimpleNamespace(total_memory=memory)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        unset = replace(data, micro_batch=given)
        return choose_micro_batch(run, unset, trainer | changes, gpu, devices)[0].micro_batch

    assert chosen(h200.memory) == make_plan(run, data, trainer, h200, 1).micro_batch == 60
    assert chosen(h200.memory, devices=4) == 15
    # the peak of 12 sequences, and nothing left over; 10 and 15 are the divisors next to it
    twelve = make_plan(run, replace(data, micro_batch=12), trainer, h200, 1).memory.peak
    assert chosen(int(twelve / 0.9) + 2) == 12 and chosen(int(twelve / 0.9) - 2) == 10
    with pytest.raises(ValueError, match="tiny does not fit"):
        chosen(1000)
    assert chosen(h200.memory, precision="bf16-true") == 60  # not in a plan, but in a run
    assert chosen(1000, given=3) == 3
