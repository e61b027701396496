"""Memory of FSDP2 on one of two processes, against the plan."""

import json
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from lightning_sv.lit.module import PretrainModule
from lightning_sv.lit.shard import shard
from lightning_sv.nn import BackboneConfig
from lightning_sv.plan.gpu_memory import gpu_memory
from lightning_sv.plan.parallel import Parallel
from lightning_sv.plan.step_memory import step_memory
from tests.launch import launch
from tests.plan.test_memory import allocated, make_module

#: d_model, blocks, vocabulary, sequences, tokens, micro-batches; blocks, embedding or activations
#: lead
CASES = [
    (256, 4, 512, 1, 32, 1),
    (192, 4, 1024, 4, 128, 1),
    (192, 4, 1024, 4, 128, 2),
    (128, 3, 16384, 1, 32, 3),
]
STEPS = 3


def make(d_model: int, n_layer: int, vocab_size: int) -> PretrainModule:
    return make_module(
        BackboneConfig(name="x", d_model=d_model, n_layer=n_layer, n_head=4, vocab_size=vocab_size)
    )


def measure(
    d_model: int, n_layer: int, vocab: int, sequences: int, tokens: int, n: int
) -> tuple[int, int]:
    """Bytes planned and bytes measured, on the first rank; the others only take part in its
    steps."""
    module = make(d_model, n_layer, vocab)
    module.configure_model()
    shard(module.net, init_device_mesh("cpu", (2,)), torch.device("cpu"), seed=0)
    optimizer = module.settings.plan.optimizer(module.net)

    def step() -> PretrainModule:
        """Lightning's automatic optimization, written out: forward, then the old gradients go."""
        for index in range(n):
            module.net.set_requires_gradient_sync(index == n - 1)
            block = torch.randint(vocab, (sequences, tokens + 1))
            loss = module.training_step(block, index)["loss"]
            if index == 0:
                optimizer.zero_grad()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(module.net.parameters(), 1.0)
        optimizer.step()
        return module

    step()
    # Gloo's threads let go of a buffer when they are scheduled to: the least of several steps is
    # the step's own.
    if distributed.get_rank():
        for _ in range(STEPS):
            step()
        return 0, 0
    measured = min(allocated(step) for _ in range(STEPS))
    plan = step_memory(make(d_model, n_layer, vocab).settings, sequences, tokens, accumulate=n > 1)
    held = plan.parts(2)  # weights, old gradients and state, allocated before the profiler looks
    planned = gpu_memory(plan, module.net.layers, Parallel("fsdp"), 2, accumulate=n > 1)
    return planned.peak, measured + sum(held)


@pytest.mark.long
def test_gpu_memory_of_fsdp_is_that_of_a_sharded_step(tmp_path: Path) -> None:
    ended = launch(__name__, logs=tmp_path)
    rows = [json.loads(line) for line in ended.logs[0].splitlines() if line.startswith("{")]
    assert len(rows) == len(CASES)
    for row in rows:
        assert row["planned"] == pytest.approx(row["real"], rel=0.1), row


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    for case in CASES:
        planned, real = measure(*case)
        if distributed.get_rank() == 0:
            print(json.dumps({"case": case, "planned": planned, "real": real}), flush=True)
    distributed.destroy_process_group()
