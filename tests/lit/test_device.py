"""`fit` on a device that no machine needs to have: torch's `meta`, whose tensors have shapes and no
values.

It runs from start to end as on a GPU. A tensor that was made on the wrong device meets one of this
device and raises; a look at a value, which on a GPU holds the host until the device has got there,
is counted.
"""

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_sv.__main__ import main
from lightning_sv.lit.cli import PretrainCLI
from lightning_sv.lit.module import PretrainModule
from tests.conftest import thinned

#: factories that copy from the host's memory, which is not page-locked: the copy waits for the
#: device
COPY_FROM_HOST = (torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy)


class Waits(TorchDispatchMode):
    """Where the host waits for the device; a value looked at is 1.

    Attributes:
        found: (optimizer steps, micro-batches) before it, and the line, of each wait.
    """

    def __init__(self, module: PretrainModule) -> None:
        super().__init__()
        self.module, self.found = module, list[tuple[int, int, str]]()
        self.micro_batches = 0

    def note(self) -> None:
        frame = sys._getframe(1)
        while "/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__:
            assert frame.f_back is not None
            frame = frame.f_back
        where = f"{frame.f_code.co_filename.rpartition('site-packages/')[2]}:{frame.f_lineno}"
        self.found.append((self.module.global_step, self.micro_batches, where))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        source = args[0] if args and isinstance(args[0], Tensor) else None
        if source is not None and source.is_meta:
            if func is torch.ops.aten._local_scalar_dense.default:
                self.note()
                return torch.ones((), dtype=source.dtype).item()
            if (
                func is torch.ops.aten._to_copy.default
                and (kwargs.get("device") or source.device).type == "cpu"
            ):
                self.note()
                return torch.ones(source.shape, dtype=kwargs.get("dtype") or source.dtype)
        out = func(*args, **kwargs)
        copies = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}
        if func in copies and isinstance(out, Tensor) and out.is_meta:
            origin = args[1] if func is torch.ops.aten.copy_.default else source
            if not origin.is_meta and not kwargs.get("non_blocking"):
                self.note()
        return out


class _Factories(TorchFunctionMode):
    """Notes the factories that copy from the host: below Python they are one with a kernel."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (
            func in COPY_FROM_HOST
            and out.is_meta
            and not (isinstance(args[0], Tensor) and args[0].is_meta)
        ):
            self.waits.note()
        return out


@contextmanager
def valueless_device() -> Iterator[list[Waits]]:
    """Let `fit` train on the device `meta`; the list gets the waits of each fit."""
    every: list[Waits] = []
    build, fit, step = PretrainCLI.instantiate_trainer, L.Trainer.fit, PretrainModule.training_step
    autocast, is_enabled = torch.autocast.__init__, torch.is_autocast_enabled

    def instantiate_trainer(self: PretrainCLI, **kwargs: Any) -> L.Trainer:
        trainer = build(self, **kwargs)
        trainer.strategy._root_device = torch.device("meta")  # type: ignore[attr-defined]
        trainer.strategy.accelerator.setup_device = lambda device: None
        return trainer

    @functools.wraps(fit)  # the command line is made from its signature
    def counted_fit(self: L.Trainer, model: Any, *args: Any, **kwargs: Any) -> None:
        every.append(Waits(model))
        with every[-1], _Factories(every[-1]):
            fit(self, model, *args, **kwargs)

    def counted_step(self: PretrainModule, *args: Any) -> Any:
        every[-1].micro_batches += 1
        return step(self, *args)

    def known(device: str) -> str:
        return "cpu" if device == "meta" else device

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PretrainCLI, "instantiate_trainer", instantiate_trainer)
        patch.setattr(L.Trainer, "fit", counted_fit)
        patch.setattr(PretrainModule, "training_step", counted_step)
        # torch supports these operations only on devices with values
        patch.setattr(torch, "is_autocast_enabled", lambda device="cpu": is_enabled(known(device)))
        patch.setattr(
            torch.autocast,
            "__init__",
            lambda self, device, *a, **k: autocast(self, known(device), *a, **k),
        )
        patch.setattr("torch.nn.utils.clip_grad._device_has_foreach_support", lambda device: True)
        patch.setattr(
            sys.modules["torch.optim.adam"],
            "_device_dtype_check_for_fused",
            lambda *args, **kwargs: None,
        )
        yield every


STEPS, ACCUMULATE = 6, 2
MIXTURE = ["--model.backbone.n_expert", "6", "--model.backbone.n_expert_active", "2"]
GEMMA = [
    "--model.backbone.post_norm",
    "true",
    "--model.backbone.qk_norm",
    "true",
    "--model.scale",
    "hg+dp+or",
]
MUON = ["--model.optim.name", "muon", "--model.optim.lr", "1e-3"]
MODELS = {
    "unified": ["--model.mask_documents", "true"],
    "probes": ["--config", "tests/lit/probes.yaml", "--model.backbone.n_layer", "1"],
    "mixture, Gemma's norms and Muon": [*MIXTURE, *GEMMA, *MUON, "--model.backbone.n_layer", "1"],
}


@pytest.mark.filterwarnings("ignore:Total length of")  # its sum over processes is a value
@pytest.mark.parametrize("name", thinned(MODELS, ["mixture, Gemma's norms and Muon"]))
def test_fit_on_a_device_waits_for_it_once_per_step(
    name: str, run_args: list[str], tmp_path: Path
) -> None:
    args = [*run_args, *MODELS[name], "--data.micro_batch", "2", "--trainer.max_steps", str(STEPS)]
    for callback in ("scalars", "branch_norms", "experts"):
        args += [f"--{callback}.every_n_steps", "100"]
    with valueless_device() as fits:
        assert main(["fit", *args, "--run_dir", str(tmp_path / "run")]) == 0
    (waits,) = fits
    assert waits.micro_batches == STEPS * ACCUMULATE
    assert [
        found for found in waits.found if found[1] % ACCUMULATE
    ] == []  # after one that is not a step's last
    lines = [[where for step, _, where in waits.found if step == of] for of in range(STEPS)]
    for of in (2, 4):  # the probes are at 0 and 1
        assert [line.partition(":")[0].rpartition("/")[2] for line in lines[of]] == ["finite.py"], (
            lines[of]
        )
