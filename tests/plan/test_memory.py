"""The memory of a plan against the bytes of the allocator in real steps on the CPU."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lightning_sv.__main__ import main
from lightning_sv.lit.module import PretrainModule
from lightning_sv.nn import BackboneConfig
from lightning_sv.nn.config import RouterConfig
from lightning_sv.optim import OptimConfig
from lightning_sv.plan.step_memory import step_memory
from lightning_sv.scale.fast.eager import unchunked
from tests.conftest import GEMMA, Answer, argv, thinned

B = 8
T = 256
D_FF = 512  # int(8 d_model / 3)
SPARSE = {"n_expert": 8, "n_expert_active": 2}
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("llama", {}, "adamw"),
    "unified": ("unified", {}, "adamw"),
    "gemma": ("hg+er", GEMMA, "adamw"),
    "moe": ("hg+dp", SPARSE, "adamw"),
    "muon": ("hg+or", {}, "muon"),
    "moe-muon": ("unified", SPARSE | {"router": RouterConfig(balance="bias")}, "muon"),
}


def allocated(work: Callable[[], Any]) -> int:
    """Peak of the bytes that torch's CPU allocator has given out and not taken back since `work`
    began."""
    gc.collect()  # objects of earlier work, in cycles, would be freed during this one's
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        kept = work()
    assert kept is not None
    now = peak = 0
    for event in sorted(trace.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def make_module(
    backbone: BackboneConfig, scale: str = "unified", optim: str = "adamw", **rest: Any
) -> PretrainModule:
    module = PretrainModule(backbone, scale, optim=OptimConfig(name=optim, lr=1e-3), **rest)
    module.log = lambda *args, **kwargs: None  # without a Trainer there is nothing to log to
    return module


def make(name: str, again: bool = False) -> PretrainModule:
    scale, sizes, optim = MODELS[name]
    backbone = BackboneConfig(name="x", d_model=192, n_layer=3, n_head=3, vocab_size=1024, **sizes)
    return make_module(backbone, scale, optim, activation_checkpointing=again)


def two_steps(module: PretrainModule, precision: str, micro_batches: int) -> PretrainModule:
    """Lightning's automatic optimization, written out."""
    module.configure_model()
    optimizer = module.settings.plan.optimizer(module.net)
    for _ in range(2):
        for index in range(micro_batches):
            block = torch.randint(module.settings.backbone.vocab_size, (B, T + 1))
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
                loss = module.training_step(block, index)["loss"]
            if index == 0:
                optimizer.zero_grad()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(module.net.parameters(), 1.0, foreach=True)
        optimizer.step()
    return module


#: model, precision, micro-batches, activation checkpointing
CASES = [(name, "32-true", 1, False) for name in MODELS]
CASES += [(name, "bf16-mixed", 2, False) for name in MODELS]
CASES += [(name, "bf16-mixed", 1, True) for name in ("unified", "moe")]


@pytest.mark.long
@pytest.mark.parametrize(("name", "precision", "micro_batches", "again"), CASES)
def test_step_memory_peak_is_that_of_a_real_step(
    name: str, precision: str, micro_batches: int, again: bool
) -> None:
    plan = step_memory(
        make(name, again).settings, B, T, precision=precision, accumulate=micro_batches > 1
    )
    with unchunked():
        real = allocated(lambda: two_steps(make(name, again), precision, micro_batches))
    # A CPU writes a float32 result into bf16 by way of a float32 copy, a GPU does not.
    copy = 4 * B * T * D_FF * (precision != "32-true")
    assert 0.99 * real - copy < sum(plan.parts()) + plan.activations < 1.01 * real
    if again:
        assert (
            plan.activations
            < 0.7 * step_memory(make(name).settings, B, T, precision=precision).activations
        )
    else:
        assert (
            plan.activations > 2 * plan.parts()[0]
        )  # the tensors that are hard to foretell dominate


def test_step_memory_of_muon_has_one_buffer_per_matrix() -> None:
    module = make("muon")
    weights, gradients, state = step_memory(module.settings, 1, 8).parts()
    module.configure_model()
    sizes = {name: value.nbytes for name, value in module.net.named_parameters()}
    assert weights == gradients == sum(sizes.values())
    matrices = 0
    for name, size in sizes.items():
        if name.startswith("layers") and name.endswith("proj.weight"):
            matrices += size
    # AdamW has two buffers and a step count for each of the others
    counts = state - (2 * weights - matrices)
    assert 0 <= counts <= 4 * len(sizes)


@pytest.mark.parametrize("micro_batch", thinned([4, 2], [2]))
def test_plan_peak_is_what_fit_allocates(
    run_args: list[str], tmp_path: Path, answer: Answer, micro_batch: int
) -> None:
    sizes = argv("--model.backbone.d_model 192 --model.backbone.n_head 3 --data.seq_len 256")
    args = [*run_args, *sizes, "--data.micro_batch", str(micro_batch), "--trainer.max_steps", "2"]
    plan = answer("plan", *args, "--gpus", "1")
    run = str(tmp_path / "run")
    with unchunked():
        real = allocated(
            lambda: main(["fit", *args, "--run_dir", run, "--data.val_sequences", "2"])
        )
    assert plan["memory"]["peak"] == pytest.approx(real, rel=0.1)
    file = tmp_path / "run/checkpoints/last.ckpt"
    assert plan["checkpoint"] == pytest.approx(file.stat().st_size, rel=0.02)
