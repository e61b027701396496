"""`fit` on a device without values."""

from pathlib import Path

import pytest

from lightning_sv.__main__ import main
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
def test_fit_on_a_device_waits_for_it_once_per_step(name: str, run_args: list[str], tmp_path: Path) -> None:
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
