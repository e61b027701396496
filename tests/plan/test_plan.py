"""Parameters against the paper, hours, data, strategies; refused inputs, and the SLURM script."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from lightning.fabric.utilities.throughput import _CUDA_FLOPS
from torch.nn.parallel import DistributedDataParallel

from lightning_sv.__main__ import main
from lightning_sv.corpus.manifest import Manifest
from lightning_sv.gpus import find_gpu
from lightning_sv.lit.run_arguments import parse_run
from lightning_sv.nn import BackboneConfig, activated_parameters, meta_backbone
from lightning_sv.optim import parameter_table
from lightning_sv.plan.gpu_memory import gpu_memory
from lightning_sv.plan.micro_batch import largest_fitting
from lightning_sv.plan.parallel import Parallel, find_strategy
from lightning_sv.plan.parameters import PAPER_NUMBERS
from lightning_sv.plan.plan import train_hours
from lightning_sv.plan.step_memory import Held, StepMemory
from tests.conftest import ROOT, Answer, argv, thinned
from tests.plan.test_memory import allocated


def test_plan_hours_are_tokens_times_flops_over_speed(
    answer: Answer, run_args: list[str], corpus: Path
) -> None:
    sizes = BackboneConfig(name="tiny", d_model=32, n_layer=2, n_head=2, vocab_size=300)
    n = activated_parameters(meta_backbone(sizes, "unified"), sizes) - 300 * 32
    flops = 6 * n + 12 * 2 * 32 * 32  # 12 layers T d
    four = ["plan", *run_args, "--gpus", "4"]
    found = answer(*four, *argv("--mfu 0.5 --trainer.precision bf16-mixed"))
    assert found["tokens"] == 12 * 4 * 32 and found["flops"] == 12 * 4 * 32 * flops
    assert found["epochs"] == pytest.approx(12 * 4 * 32 / Manifest.load(corpus).train.tokens)
    absent = answer(*four, "--data.corpus.dir", "nowhere")
    assert absent["epochs"] is None and absent["sufficient_tokens"] >= 12 * 4 * 33
    assert absent["device_counts"] == [1, 2, 4]
    (row,) = found["hours"]
    assert row["hours"] == pytest.approx(12 * 4 * 32 * flops / (4 * 989.4e12 * 0.5) / 3600)
    budget = answer(*four, *argv("--trainer.max_steps -1 --model.tokens_per_param 3"))
    assert budget["steps"] == -(-3 * budget["parameters"] // 128)
    assert [row["mfu"] for row in budget["hours"]] == [0.3, 0.4, 0.5]


def test_find_gpu_peaks_are_those_of_lightning() -> None:
    for name, listed in {"h100": "h100 sxm", "a100-80gb": "a100", "a100-40gb": "a100"}.items():
        for precision, dtype in {
            "bf16-mixed": torch.bfloat16,
            "16-mixed": torch.float16,
            "32-true": torch.float32,
        }.items():
            assert find_gpu(name).peak(precision) == _CUDA_FLOPS[listed][dtype]
    assert train_hours(3600, 2.0, 1, 4.0, 0.5) == 1.0


def test_gpu_memory_rounds_shards_up_and_copies_into_buckets(tmp_path: Path) -> None:
    blocks = torch.nn.ModuleList(torch.nn.Linear(10, 6, bias=False) for _ in range(2))
    held = (Held(6, 240, 240, 480), Held(6, 240, 240, 480), Held(1, 40, 40, 0))
    step = StepMemory(held, 0, 1000)
    fsdp = gpu_memory(
        step, blocks, Parallel("fsdp"), 4
    )  # two of six rows each, and a row that cannot be cut
    assert (fsdp.weights, fsdp.optimizer) == (200, 320)
    # the middle of backward: the gradients of both blocks, two roots, four blocks, a block's
    # activations
    assert (fsdp.gradients, fsdp.communication, fsdp.activations) == (185, 2 * 40 + 4 * 240, 500)
    # the end of forward: the gradients of the step before, one root and the head's gradient
    activated = gpu_memory(StepMemory(held, 0, 10_000), blocks, Parallel("fsdp"), 2)
    assert (activated.gradients, activated.communication) == (280, 40 + 20)
    for gpus in (1, 4):
        assert gpu_memory(step, blocks, Parallel("ddp"), gpus).communication == 520
    assert gpu_memory(step, blocks, Parallel("ddp", bucket_view=True), 4).communication == 0
    model = torch.nn.Linear(1000, 1000, bias=False)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        assert allocated(lambda: DistributedDataParallel(model)) == pytest.approx(4e6, rel=0.01)
    finally:
        torch.distributed.destroy_process_group()


def test_largest_fitting_is_the_largest_divisor_that_fits() -> None:
    for share in (1, 7, 10, 60):
        divisors = [d for d in range(1, share + 1) if share % d == 0]
        for at_once in (0, 100):  # saved by the full share
            for limit in (3, 7, 20, 25, 60, 95, 300):
                peak = {d: 5 + 3 * d - at_once * (d == share) for d in divisors}
                best = max((d for d in divisors if peak[d] <= limit), default=None)
                asked: list[int] = []
                found = largest_fitting(
                    divisors, lambda d, peak=peak, asked=asked: asked.append(d) or peak[d], limit
                )
                assert found == best
                assert len(asked) <= 5


FSDP = "lightning_sv.lit.fsdp.FullyShardedStrategy"
DDP = "lightning.pytorch.strategies.DDPStrategy"


def test_plan_strategy_and_memory_follow_the_config(answer: Answer, run_args: list[str]) -> None:
    four = [*run_args, "--gpus", "4"]
    sharded = answer("plan", *four, "--trainer.strategy", json.dumps({"class_path": FSDP}))
    assert sharded["strategy"] == "fsdp" and sharded["fits"] and sharded["largest_micro_batch"] == 1
    with pytest.raises(ValueError, match="timeout"):
        parse_run([*run_args, *argv("--trainer.strategy fsdp --trainer.strategy.timeout=1:00:00")])
    viewed = {"class_path": DDP, "init_args": {"gradient_as_bucket_view": True}}
    assert find_strategy({"strategy": viewed}, 4) == Parallel("ddp", bucket_view=True)
    assert find_strategy({"strategy": "ddp"}, 1) == Parallel("ddp")
    assert find_strategy({}, 1) == Parallel("single")
    named = answer("plan", *argv("--gpus 2 --model tiny --model.compile none"))
    assert (named["strategy"], named["precision"]) == ("ddp", "bf16-mixed")
    small = answer("plan", *four, "--gpu_memory", "0.0001")
    assert small["strategy"] == "ddp" and not small["fits"] and small["largest_micro_batch"] is None


def test_plan_says_whether_activations_are_those_of_compiled_code(
    run_args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    shown = []
    for mode in ("none", "block"):
        assert main(["plan", *run_args, "--gpus", "1", "--model.compile", mode]) == 0
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "activations" in line]
        shown.append(line.rpartition(",")[2].strip(" │"))
    assert shown == ["in eager mode", "compiled"]


TRAINERS = [
    path.stem for path in sorted((ROOT / "conf/trainer").glob("*.yaml")) if path.stem != "cpu"
]


@pytest.mark.parametrize("trainer", thinned(TRAINERS, ["fsdp"]))
@pytest.mark.parametrize("nodes", [1, 6])
def test_sbatch_script_starts_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], nodes: int, trainer: str
) -> None:
    script = ROOT / "conf/slurm/train.sbatch"
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/bash\nprintf "%s\\0" "$@"\n')
    srun.chmod(0o755)
    env = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_NNODES": str(nodes),
        "SLURM_CPUS_PER_TASK": "8",
    }
    env |= {"TRAINER": trainer, "ARGS": "--trainer.max_steps 7"} | (
        {"MICRO": "2"} if nodes == 6 else {}
    )
    done = subprocess.run(
        ["bash", str(script)], env=env, cwd=ROOT, capture_output=True, text=True, check=True
    )
    words = done.stdout.removesuffix("\0").split("\0")
    before = words[: words.index("fit")]
    args = words[words.index("fit") :]
    assert before == ["--kill-on-bad-exit=1", "--cpus-per-task=8", ".venv/bin/lightning-sv"]
    with pytest.raises(SystemExit) as stop:
        main([*args, "--print_config"])
    assert stop.value.code == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["trainer"]["num_nodes"] == nodes and int(config["trainer"]["devices"]) == 8
    assert config["ckpt_path"] == "last"
    # null: `fit` chooses the largest batch that fits the GPU
    assert config["data"]["micro_batch"] == (None if nodes == 1 else 2)
    assert (
        config["data"]["global_batch"] % (8 * nodes) == 0
        and int(config["trainer"]["max_steps"]) == 7
    )


@pytest.mark.parametrize(
    "number",
    thinned(PAPER_NUMBERS, PAPER_NUMBERS[::3]),
    ids=lambda n: f"{n.model}-{n.scale}-{n.computed}",
)
def test_params_numbers_round_to_the_printed_ones(number, answer: Answer) -> None:
    model = f"conf/model/{number.model}.yaml"
    made = answer("params", "--config", str(ROOT / model), "--model.scale", number.scale)
    (row,) = (row for row in made["paper"] if row["what"] == number.what)
    printed = number.printed.replace(",", "")
    if printed.endswith("B"):
        digits = len(printed.partition(".")[2]) - 1
        rounded = f"{row['computed'] / 1e9:.{digits}f}B"
    elif "e" in printed:
        rounded = f"{row['computed']:.2e}"
    else:
        rounded = str(row["computed"])
    assert (rounded == printed) != ("discrepancy" in number.comment)


def test_params_of_unified_have_roles_and_decay(answer: Answer) -> None:
    model = ROOT / "conf/model/llama-0.12b.yaml"
    made = answer("params", "--config", str(model), "--model.scale", "unified")
    roles = made["roles"]
    assert made["total"] == sum(role["parameters"] for role in roles.values()) == 119_846_846
    assert roles["embedding"]["parameters"] == 50_304 * 768
    assert roles["input"]["parameters"] == (5 * 6 + 1) * 769 and roles["input"]["decays"]
    assert (
        roles["output"]["parameters"] == 6 * (3 * 769 + 2 * 2049) + 50_305
        and not roles["output"]["decays"]
    )
    assert made["baseline_total"] == 119_744_256


@pytest.mark.parametrize("words", [
    ("--model.optim.undecayed", "[embedding]"),
    ("--model.optim.weight_decay", "0"),
])  # fmt: skip
def test_params_decay_is_that_of_the_optimizer(
    words: tuple[str, str], answer: Answer, run_args: list[str]
) -> None:
    by_role = ["--model.optim.weight_decay_by_role", "{head: 0.0, input: 0.002}"]
    args = [*run_args, "--model.scale", "unified", *by_role, *words]
    plan = parse_run(args).model.plan
    meta = plan.meta()
    rows = parameter_table(meta, plan.optimizer(meta))
    decays = {role: float(weight_decay) > 0 for _, _, role, _, _, weight_decay in rows}
    counted = answer("params", *args)["roles"]
    assert {role: row["decays"] for role, row in counted.items()} == decays
    assert len(set(decays.values())) == 2
