"""`fit` on a device without values, and the micro-batch of a GPU."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_sv.__main__ import main
from lightning_sv.lit.data import choose_micro_batch
from lightning_sv.nn.gpus import find_gpu
from lightning_sv.plan.plan import make_plan
from lightning_sv.settings.parse import parse_run
from tests.conftest import thinned
from tests.lit.fake_device import valueless_device

STEPS, ACCUMULATE = 6, 2
MIXTURE = ["--model.backbone.n_expert", "6", "--model.backbone.n_expert_active", "2"]
GEMMA = ["--model.backbone.post_norm", "true", "--model.backbone.qk_norm", "true", "--model.scale", "hg+dp+or"]
MUON = ["--model.optim.name", "muon", "--model.optim.lr", "1e-3"]
MODELS = {
    "unified": ["--model.mask_documents", "true"],
    "probes": ["--config", "tests/lit/probes.yaml", "--model.backbone.n_layer", "1"],
    "mixture, Gemma's norms and Muon": [*MIXTURE, *GEMMA, *MUON, "--model.backbone.n_layer", "1"],
}


@pytest.mark.filterwarnings("ignore:Total length of")  # its sum over processes is a value
@pytest.mark.parametrize("name", thinned(MODELS, ["mixture, Gemma's norms and Muon"]))
def test_fit_tensors_are_on_its_device_and_it_waits_once_per_step(
    name: str, run_args: list[str], tmp_path: Path
) -> None:
    args = [*run_args, *MODELS[name], "--data.micro_batch", "2", "--trainer.max_steps", str(STEPS)]
    for callback in ("scalars", "branch_norms", "experts"):
        args += [f"--{callback}.every_n_steps", "100"]
    with valueless_device() as fits:
        assert main(["fit", *args, "--run_dir", str(tmp_path / "run")]) == 0
    (waits,) = fits
    assert waits.micro_batches == STEPS * ACCUMULATE
    assert [found for found in waits.found if found[1] % ACCUMULATE] == []  # after one that is not a step's last
    lines = [[where for step, _, where in waits.found if step == of] for of in range(STEPS)]
    for of in (2, 4):  # the probes are at 0 and 1
        assert [line.partition(":")[0].rpartition("/")[2] for line in lines[of]] == ["nonfinite.py"], lines[of]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], torch.device]:
    """Return a CUDA device with a given number of bytes."""

    def of(memory: int) -> torch.device:
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=memory))
        return torch.device("cuda", 0)

    return of


@pytest.mark.long
def test_micro_batch_of_gpu_is_the_largest_that_fits(run_args: list[str], card: Callable[[int], torch.device]) -> None:
    args = [*run_args, "--data.global_batch", "60", "--trainer.precision", "bf16-mixed"]
    args += ["--model.backbone.n_layer", "1"]

    def chosen(memory: int, devices: int = 1) -> int | None:
        run, data, trainer = parse_run(args)
        said = choose_micro_batch(run, data, trainer, card(memory), devices)
        assert said is not None and f"micro-batches of {data.micro_batch} x 32 tokens" in said
        return data.micro_batch

    run, data, trainer = parse_run(args)
    plan = make_plan(run, data, trainer, find_gpu("h200"), 1)
    assert (chosen(find_gpu("h200").memory), plan.micro_batch, plan.micro_batches) == (60, 60, 1)
    assert chosen(find_gpu("h200").memory, devices=4) == 15
    # the peak of 12 sequences, and nothing left over; 15 is the next divisor
    data.micro_batch = 12
    twelve = make_plan(run, data, trainer, find_gpu("h200"), 1).memory.peak
    assert chosen(int(twelve / 0.9) + 2) == 12 and chosen(int(twelve / 0.9) - 2) == 10
    with pytest.raises(ValueError, match="tiny does not fit: one sequence of 32 tokens takes 0.0 GiB"):
        chosen(1000)
    for precision in ("bf16-true", "16-true", "16-mixed"):  # not in a plan, but in a run
        data.micro_batch = None
        choose_micro_batch(run, data, trainer | {"precision": precision}, card(find_gpu("h200").memory), 1)
        assert data.micro_batch == 60
    data.micro_batch = 3
    assert choose_micro_batch(run, data, trainer, card(1000), 1) is None and data.micro_batch == 3
