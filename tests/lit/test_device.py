"""The micro-batch of a GPU, by the plan of the run."""

from types import SimpleNamespace

import pytest
import torch

from lightning_sv.lit.data import choose_micro_batch
from lightning_sv.nn.gpus import find_gpu
from lightning_sv.plan.plan import make_plan
from lightning_sv.settings.parse import parse_run


@pytest.mark.long
def test_choose_micro_batch_of_a_gpu_is_the_largest_that_fits(
    run_args: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = [*run_args, "--data.global_batch", "60", "--trainer.precision", "bf16-mixed"]
    args += ["--model.backbone.n_layer", "1"]
    h200, gpu = find_gpu("h200"), torch.device("cuda", 0)

    def chosen(memory: int, devices: int = 1, precision: str = "bf16-mixed", micro_batch: int | None = None) -> int:
        properties = SimpleNamespace(total_memory=memory)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        run, data, trainer = parse_run(args)
        data.micro_batch = micro_batch
        said = choose_micro_batch(run, data, trainer | {"precision": precision}, gpu, devices)
        assert (said is None) == (micro_batch is not None) and data.micro_batch is not None
        return data.micro_batch

    run, data, trainer = parse_run(args)
    plan = make_plan(run, data, trainer, h200, 1)
    assert (chosen(h200.memory), plan.micro_batch, plan.micro_batches) == (60, 60, 1)
    assert chosen(h200.memory, devices=4) == 15
    # the peak of 12 sequences, and nothing left over; 15 is the next divisor
    data.micro_batch = 12
    twelve = make_plan(run, data, trainer, h200, 1).memory.peak
    assert chosen(int(twelve / 0.9) + 2) == 12 and chosen(int(twelve / 0.9) - 2) == 10
    with pytest.raises(ValueError, match="tiny does not fit: one sequence of 32 tokens takes 0.0 GiB"):
        chosen(1000)
    for precision in ("bf16-true", "16-true", "16-mixed"):  # not in a plan, but in a run
        assert chosen(h200.memory, precision=precision) == 60
    assert chosen(1000, micro_batch=3) == 3
