"""Reads of tensors by the host, for which it waits on a GPU."""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_sv import PretrainCLI, PretrainModule
from tests.conftest import argv, thinned

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


class Watched(PretrainModule):
    """Notes the reads in two steps, in which no callback measures."""

    reads: HostReads

    def optimizer_step(self, *given: Any) -> None:
        with self.reads if self.global_step in (2, 4) else nullcontext():
            super().optimizer_step(*given)


@pytest.mark.parametrize("name", thinned(MODELS, ["mixture, Gemma's norms and Muon"]))
def test_fit_step_reads_no_value_but_in_the_check_of_a_batch(
    name: str, run_args: list[str], tmp_path: Path
) -> None:
    """The check is for batches on the host; `FiniteGuard` copies three numbers at once."""
    Watched.reads = HostReads()
    words = (
        f"{MODELS[name]} --trainer.max_steps 6 --scalars.every_n_steps 100 --data.micro_batch 4"
        " --branch_norms.every_n_steps 100 --experts.every_n_steps 100"
        f" --run_dir {tmp_path / 'run'}"
    )
    PretrainCLI(Watched, args=["fit", *run_args, *argv(words)])
    assert Watched.reads.files <= {"batch.py", "batching.py"}
