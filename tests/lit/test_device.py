"""Reads of tensors by the host, for which it waits on a GPU."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_sv import PretrainModule
from tests.conftest import argv, thinned
from tests.lit.runs import run_fit

PACKAGE = str(Path(sys.modules["lightning_sv"].__file__).parent)
MODELS = {
    "unified": "--model.mask_documents true",
    "mixture, Gemma's norms and Muon": (
        "--model.backbone.n_expert 6 --model.backbone.n_expert_active 2 --model.scale hg+dp+or"
        " --model.backbone.post_norm true --model.backbone.qk_norm true"
        " --model.optim.name muon --model.optim.lr 1e-3"
    ),
}


class HostReads(TorchDispatchMode):
    """Note the files of the package that ask for the value of a tensor in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.files: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            frame = sys._getframe(1)
            while frame.f_back is not None and not frame.f_code.co_filename.startswith(PACKAGE):
                frame = frame.f_back
            self.files.add(Path(frame.f_code.co_filename).name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", thinned(MODELS, ["mixture, Gemma's norms and Muon"]))
def test_fit_step_reads_no_value_but_in_the_check_of_a_batch(
    name: str, run_args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check is for batches on the host; `FiniteGuard` copies three numbers at once."""
    reads = HostReads()
    step = PretrainModule.optimizer_step

    def watched(self: PretrainModule, *given: Any) -> None:
        if self.global_step in (2, 4):  # callbacks measure at other steps
            with reads:
                step(self, *given)
        else:
            step(self, *given)

    monkeypatch.setattr(PretrainModule, "optimizer_step", watched)
    quiet = "--trainer.max_steps 6 --scalars.every_n_steps 100 --branch_norms.every_n_steps 100"
    words = argv(f"{MODELS[name]} {quiet} --experts.every_n_steps 100 --data.micro_batch 4")
    assert run_fit([*run_args, *words], tmp_path / "run") == 0
    assert reads.files <= {"batch.py", "batching.py"}, reads.files
