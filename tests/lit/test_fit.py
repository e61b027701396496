"""Runs through the command line, in process: what they leave, and what they refuse."""

import contextlib
import io
import json
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from lightning_sv.__main__ import main
from lightning_sv.lit.summary import print_summary, write_parameters
from lightning_sv.runs.checkpoint import FORMAT, load_backbone
from lightning_sv.runs.events import read_run
from lightning_sv.settings.parse import parse_run
from tests.conftest import thinned, write_run_args
from tests.lit.runs import contents


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory that no test writes to; beside it, in said.txt, what the command said."""
    folder = tmp_path_factory.mktemp("run")
    with (folder / "said.txt").open("w") as said, contextlib.redirect_stdout(said):
        assert main(["fit", *write_run_args(corpus, folder), "--run_dir", str(folder / "run")]) == 0
    return folder / "run"


def test_a_run_leaves_everything(
    capsys: pytest.CaptureFixture[str], run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["label"], summary["steps"], summary["tokens"]) == ("hg+dnp+or+iwd", 12, 12 * 4 * 32)
    record = read_run(run)
    tokens, losses = record.curve("train/loss")
    assert tokens.tolist() == [128 * step for step in range(1, 13)]
    assert losses[-1] < losses[0]
    assert record.curve("val/loss").tokens.tolist() == [128 * 6, 128 * 12]
    assert record.curve("val/loss").values[-1] == pytest.approx(summary["val_loss"], rel=1e-6)
    for tag in ("lr", "grad_norm", "throughput/tokens_per_s", "throughput/mfu", "memory/peak_gib"):
        assert (record.curve(tag).values > 0).all(), tag
    for branch in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        for kind in ("W", "gamma_in", "gamma_out", "effective"):
            assert record.curve(f"branch_norm/mean/{branch}/{kind}").tokens.tolist()[0] == 0
    assert (run / "run.png").stat().st_size > 10_000
    out = run.with_name("said.txt").read_text()
    assert "input scale" in out and "bits per byte" in out and f"generate {run}" in out
    shown = dict(re.findall(r"^step (\d+)/12 .*  val (\S+)", out, re.MULTILINE))
    first, last = record.curve("val/loss").values
    assert shown == {
        str(step): f"{last if step == 12 else first:.3f}" for step in range(6, 13)
    }  # its own, if it has one
    # the saved config starts the run again, and gives the same losses
    monkeypatch.chdir(tmp_path)
    assert main(["fit", "--config", str(run / "config.yaml"), "--json", "true"]) == 0
    figures = json.loads(capsys.readouterr().out)
    again = Path(figures["run_dir"])
    assert again == Path("runs/tiny/hg+dnp+or+iwd-seed0") and figures["val_loss"] == summary["val_loss"]
    assert read_run(again).curve("train/loss").values.tolist() == losses.tolist()


def test_the_command_at_a_runs_end_compares_its_own_model_and_data(run: Path) -> None:
    said = Console(file=io.StringIO(), width=80)
    summary = json.loads((run / "summary.json").read_text())
    print_summary(said, summary, run)
    (command,) = re.findall(r"compare  (lightning-sv compare .*)", said.file.getvalue())  # type: ignore[attr-defined]
    _, _, _, a, _, b, *rest = shlex.split(command)
    assert (a, b, rest[:2]) == ("llama", "hg+dnp+or+iwd", ["--seeds", "3"])
    model, data, trainer = parse_run(rest[2:])
    assert (model.n_params, trainer["max_steps"]) == (summary["parameters"], summary["steps"])
    assert data.manifest.corpus_hash == summary["corpus_hash"]


def test_checkpoint_rebuilds_the_model_and_generates(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "checkpoints" / "last.ckpt"
    model = load_backbone(run)
    assert all(map(torch.equal, model.parameters(), load_backbone(str(path)).parameters()))
    weights = torch.load(path, weights_only=True)["state_dict"]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[f"backbone.{name}"])
    moved = shutil.copytree(run, tmp_path / "moved")
    capsys.readouterr()
    texts = []
    for _ in range(2):
        assert main(["generate", str(moved), "--prompt", "def ", "--tokens", "9", "--json"]) == 0
        texts.append(json.loads(capsys.readouterr().out))
    assert texts[0] == texts[1] and texts[0]["prompt"] == "def " and texts[0]["text"]


def test_accumulation_gives_the_same_run(run_args: list[str], tmp_path: Path) -> None:
    """In float64, where the order of the sums does not show; the event files keep float32."""
    wide = [*run_args, "--trainer.precision", "64-true"]
    assert main(["fit", *wide, "--run_dir", str(tmp_path / "whole")]) == 0
    assert main(["fit", *wide, "--data.micro_batch", "2", "--run_dir", str(tmp_path / "accumulated")]) == 0
    ours, theirs = read_run(tmp_path / "whole"), read_run(tmp_path / "accumulated")
    assert ours.curve("train/loss").tokens.tolist() == theirs.curve("train/loss").tokens.tolist()
    assert theirs.curve("train/loss").values == pytest.approx(ours.curve("train/loss").values, rel=1e-6)
    assert theirs.curve("val/loss").tokens.tolist() == ours.curve("val/loss").tokens.tolist()


def test_muon_and_wsd(run_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In parts as in one, near it in bf16; wsd reaches both kinds of group; the checkpoint holds plain values."""
    args = ["--model.optim.name", "muon", "--model.optim.lr", "0.01", "--model.schedule.name", "wsd"]
    args = [*run_args, *args, "--model.schedule.warmup_ratio", "0.2", "--model.schedule.final_ratio", "0"]
    wide = ["--model.optim.ns_dtype", "float64", "--trainer.precision", "64-true"]
    runs = {
        "whole": wide,
        "parts": [*wide, "--data.micro_batch", "1"],
        "bf16": ["--trainer.precision", "bf16-mixed"],
    }
    for name, more in runs.items():
        assert main(["fit", *args, *more, "--run_dir", str(tmp_path / name)]) == 0
    assert re.search(r"matrix .* muon .* 0.01 .* 0.1", capsys.readouterr().out)
    each = (tmp_path / "whole/parameters.csv").read_text().splitlines()
    assert "layers.0.attn.qkv.q_proj.weight,32x32,matrix,muon,0.01,0.1" in each
    assert "head.lm_head.weight,300x32,head,adamw,0.01,0.1" in each
    assert "layers.1.ffn.gate_up.up_proj.scale_out.alpha,85,output,adamw,0.01,0" in each
    record = read_run(tmp_path / "whole")
    factors = [1 / 3, 2 / 3, *[1.0] * 9, 0.5]
    assert record.curve("lr").values == pytest.approx([0.01 * factor for factor in factors])
    losses = record.curve("train/loss").values
    assert losses[-1] < losses[0] - 0.3
    assert read_run(tmp_path / "parts").curve("train/loss").values == pytest.approx(losses, rel=1e-6)
    assert read_run(tmp_path / "bf16").curve("train/loss").values == pytest.approx(losses, rel=0.02)
    checkpoint = torch.load(tmp_path / "bf16" / "checkpoints" / "last.ckpt", weights_only=True)
    (optimizer,) = checkpoint["optimizer_states"]
    assert {(group["kind"], group["initial_lr"]) for group in optimizer["param_groups"]} == {
        ("muon", 0.01),
        ("adamw", 0.01),
    }


def test_roles_that_do_not_decay_are_in_parameters_csv(run_args: list[str], tmp_path: Path) -> None:
    switches = ["--model.optim.undecayed", "[embedding,head]", "--model.optim.name", "muon", "--model.optim.lr", "0.01"]
    module, *_ = parse_run([*run_args, *switches, "--model.optim.muon_roles", "[matrix,head]"])
    write_parameters(tmp_path, SimpleNamespace(settings=module))
    rows = [line.split(",") for line in (tmp_path / "parameters.csv").read_text().splitlines()[1:]]
    assert {tuple(row[2:]) for row in rows} == {
        ("matrix", "muon", "0.01", "0.1"), ("head", "muon", "0.01", "0"), ("embedding", "adamw", "0.01", "0"),
        ("input", "adamw", "0.01", "0.1"), ("output", "adamw", "0.01", "0"),
    }  # fmt: skip


@pytest.mark.parametrize("written", thinned([FORMAT + 1, FORMAT - 1, "2", True, None], [FORMAT + 1]))
def test_checkpoint_of_another_format_is_refused(
    written: object, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["lightning_sv"]["format"] == FORMAT
    checkpoint["lightning_sv"]["format"] = written
    later = tmp_path / "later.ckpt"
    torch.save(checkpoint, later)
    why = f"{later} is of format {written!r}"
    assert main(["validate", "--config", str(run / "config.yaml"), "--ckpt_path", str(later)]) == 2
    assert why in capsys.readouterr().err
    with pytest.raises(ValueError, match=re.escape(why)):
        load_backbone(str(later))


def test_budget_bf16_compile_masks_and_validate(
    short_corpus: Path, run: Path, run_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    budget = ["--trainer.max_steps=-1", "--model.tokens_per_param", "0.02"]
    switches = ["--trainer.precision", "bf16-mixed", "--model.mask_documents", "true"]
    assert main(["fit", *run_args, *budget, *switches, "--run_dir", str(tmp_path / "b")]) == 0
    summary = json.loads((tmp_path / "b" / "summary.json").read_text())
    assert summary["steps"] == -(-0.02 * summary["parameters"] // 128)
    losses = read_run(tmp_path / "b").curve("train/loss").values
    assert losses == pytest.approx(read_run(run).curve("train/loss").values[: len(losses)], rel=0.02)
    capsys.readouterr()
    checkpoint = str(run / "checkpoints" / "last.ckpt")
    assert main(["plan", "--gpus", "2", "--config", str(run / "config.yaml"), "--data.micro_batch", "1"]) == 0
    capsys.readouterr()
    assert main(["validate", "--config", str(run / "config.yaml"), "--ckpt_path", checkpoint]) == 0
    val_loss = json.loads((run / "summary.json").read_text())["val_loss"]
    assert float(capsys.readouterr().out.split()[1]) == pytest.approx(val_loss, abs=1e-4)
    other = ["--config", str(run / "config.yaml"), "--data.corpus.dir", str(short_corpus)]  # a bpe:300 of its own text
    assert main(["validate", *other, "--ckpt_path", checkpoint]) == 2
    assert "the checkpoint was trained with tokenizer_sha256 = " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model.scale", "hg+dpn"], "unknown token 'dpn'"),
        (["--model.backbone.d_modell", "64"], "Did you mean 'model.backbone.d_model'"),
        (["--data.global_bacth", "4"], "Did you mean 'data.global_batch'"),
        (["--model.backbone.n_head", "3"], "d_model is 32; expected a multiple of n_head 3"),
        (["--model.backbone.vocab_size", "200"], "vocab_size is 200"),
        (["--data.corpus.tokenizer", "gpt2"], "bpe:300"),
        (["--data.seq_len", "1000000"], "seq_len is 1000000"),
        (["--data.val_sequences", "-3"], "data.val_sequences is -3"),
        (["--trainer.max_steps", "0"], "trainer.max_steps is 0"),
        (["--trainer.overfit_batches", "1"], "Prepare a corpus of the text to repeat"),
        (["--trainer.gradient_clip_algorithm", "value"], "As in the paper, trainer.gradient_clip_val"),
        (["--trainer.enable_progress_bar", "false"], "enable_progress_bar"),
        (["--ckpt_path", "last.ckpt"], "no checkpoint at last.ckpt"),
        (["--ckpt_path", __file__], "is not a readable checkpoint"),
        (["--data.micro_batch", "3"], "data.micro_batch is 3; expected a divisor"),
        (["--trainer.accumulate_grad_batches", "2"], "Set data.global_batch and data.micro_batch instead"),
        (["--model.backbone.name", "mine"], "set model.optim.lr"),
        (["--model.optim.name", "sgd"], "known: adamw muon"),
        (["--data.corpus.dir", "nowhere"], "nowhere/manifest.json does not exist"),
        (["--config", "nothing.yaml"], "nothing.yaml: there is no such file"),
    ],
)
def test_wrong_input_stops_before_the_first_step(
    args: list[str], message: str, run_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", *run_args, *args, "--run_dir", str(tmp_path / "refused")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and "Traceback" not in error
    assert not list((tmp_path).glob("refused/events*"))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model.backbone.n_expert", "4"], "model.backbone.n_expert is 4; expected more than n_expert_active 4"),
        (
            ["--model.backbone.qk_norm", "true"],
            "model.backbone.qk_norm is true",
        ),
        (
            ["--model.backbone.router.balance", "luck"],
            "model.backbone.router.balance 'luck' is unknown; known: loss bias none",
        ),
        (
            ["--model.schedule.name", "wsd", "--model.schedule.warmup_ratio", "0.9"],
            "model.schedule.warmup_ratio is 0.9",
        ),
    ],
)
def test_a_model_that_cannot_be_is_refused_before_the_corpus_is_read(
    args: list[str], message: str, run_args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", *run_args, "--data.corpus.dir", "missing", *args]) == 2
    assert f"error: {message}" in capsys.readouterr().err


def test_misspelled_key_in_yaml_and_bad_interpolation(
    run_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for text, message in (
        ("model: {optim: {weight_deacy: 0.1}}", "weight_decay"),
        ("model: {optim: {lr: '${nowhere.lr}'}}", "nowhere"),
        ("model: [", "wrong.yaml is not valid YAML"),
    ):
        (tmp_path / "wrong.yaml").write_text(text)
        assert main(["fit", *run_args, "--config", str(tmp_path / "wrong.yaml")]) == 2
        error = capsys.readouterr().err
        assert message in error and "Traceback" not in error, error


def test_interpolation_sees_overrides(run_args: list[str], tmp_path: Path) -> None:
    (tmp_path / "more.yaml").write_text("model: {optim: {weight_decay: '${model.optim.lr}'}}")
    args = ["--config", str(tmp_path / "more.yaml"), "--model.optim.lr", "0.007", "--run_dir", str(tmp_path / "i")]
    assert main(["fit", *run_args, *args, "--trainer.max_steps", "1"]) == 0
    assert read_run(tmp_path / "i").config["model"]["optim"]["weight_decay"] == 0.007


def test_fast_dev_run_and_a_users_own_logger(run_args: list[str], tmp_path: Path) -> None:
    assert main(["fit", *run_args, "--trainer.fast_dev_run", "true", "--run_dir", str(tmp_path / "dev")]) == 0
    assert not (tmp_path / "dev" / "summary.json").exists()
    csv = [
        "--trainer.logger",
        "lightning.pytorch.loggers.CSVLogger",
        "--trainer.logger.save_dir",
        str(tmp_path / "csv"),
    ]
    assert main(["fit", *run_args, *csv, "--run_dir", str(tmp_path / "both")]) == 0
    assert "train/loss" in next((tmp_path / "csv").rglob("metrics.csv")).read_text()
    assert read_run(tmp_path / "both").curve("train/loss").tokens[-1] == 12 * 128


def test_a_directory_that_holds_a_run_is_refused(
    run: Path, run_args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = (run / "config.yaml").read_bytes()
    assert main(["fit", *run_args, "--run_dir", str(run)]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert (run / "config.yaml").read_bytes() == before


def test_a_refused_resume_leaves_the_run_as_it_was(
    run: Path, run_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another rate, batch, strategy, model or length; a checkpoint that is damaged where Lightning alone reads it."""
    run = shutil.copytree(run, tmp_path / "run")
    before, last = contents(run), run / "checkpoints/last.ckpt"
    longer = ["--trainer.max_steps", "14"]
    changes = {
        "optim.lr = 0.006": ["--model.optim.lr", "1e-9"],
        "data.global_batch = 4": ["--data.global_batch", "8"],
        "scale = hg": ["--model.scale", "llama"],
        "backbone.d_model = 32": ["--model.backbone.d_model", "64"],
        "at step 12 of 12 of its cos schedule": [],
    }
    for said, change in changes.items():
        assert main(["fit", *run_args, "--ckpt_path", str(last), *longer, *change]) == 2
        out, err = capsys.readouterr()
        assert err.startswith("error: the checkpoint ") and said in err and "new run" in err and not out, (out, err)
        assert contents(run) == before, change
    checkpoint = torch.load(last, weights_only=True)
    for key in ("loops", "callbacks"):
        torch.save(checkpoint | {key: 7}, last)
        before = contents(run)
        assert main(["fit", *run_args, *longer, "--extend", "--ckpt_path", str(last)]) == 2
        out, err = capsys.readouterr()
        assert err.startswith("error: the checkpoint cannot be resumed") and "esume with" not in out
        assert contents(run) == before
    assert main(["validate", *run_args]) == 2
    assert "validate needs a checkpoint" in capsys.readouterr().err


def test_zero_means_no_clipping(run_args: list[str], tmp_path: Path) -> None:
    for name, value in (("none", "null"), ("zero", "0")):
        assert main(["fit", *run_args, "--trainer.gradient_clip_val", value, "--run_dir", str(tmp_path / name)]) == 0
    losses = [read_run(tmp_path / name).curve("train/loss").values.tolist() for name in ("none", "zero")]
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0]


@pytest.mark.parametrize(
    "damage", thinned(["manifest", "index", "missing shard", "truncated shard", "altered shard"], ["altered shard"])
)
def test_a_damaged_corpus_is_named(
    damage: str, corpus: Path, run_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(corpus, copy)
    shard = next(copy.glob("train/*.bin"))
    match damage:
        case "manifest":
            named = copy / "manifest.json"
            named.unlink()
        case "index":
            named = copy / "train" / "index.json"
            named.unlink()
        case "missing shard":
            named = shard
            shard.unlink()
        case "truncated shard":
            named = shard
            shard.write_bytes(shard.read_bytes()[:-100])
        case _:
            named = shard
            raw = bytearray(shard.read_bytes())
            raw[-50] ^= 1
            shard.write_bytes(bytes(raw))
    assert main(["fit", *run_args, "--data.corpus.dir", str(copy), "--run_dir", str(tmp_path / "r")]) == 2
    error = capsys.readouterr().err
    assert named.name in error and "prepare" in error, error
