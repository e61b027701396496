"""What the ranks of a launch run: `torchrun -m tests.lit.ranks TASK ARGS`; a task is a function of
this file."""

import errno
import json
import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.loops import utilities
from torch import distributed

from lightning_sv import Backbone, PretrainModule, Sharpness, TokenDataModule
from lightning_sv.__main__ import main
from lightning_sv.callbacks import TrainingMonitor, write_scalars
from lightning_sv.errors import ConfigError
from lightning_sv.lit.checkpoint import sharded_write
from lightning_sv.lit.checkpoint.shared_folder import check_shared_folder
from lightning_sv.lit.fsdp import FullyShardedStrategy
from lightning_sv.optim import OptimConfig, full_tensor
from lightning_sv.runs.lock import find_last_checkpoint
from lightning_sv.runs.sharded_checkpoint import is_sharded
from tests.conftest import file_size_limit
from tests.lit.own_trainer import SIZES
from tests.lit.several_processes import CPU, STRATEGIES

RANK = int(os.environ.get("RANK", "0"))
RANKS = int(os.environ.get("WORLD_SIZE", "1"))


def trainer_of(**arguments: Any) -> L.Trainer:
    """Return a quiet Trainer of two steps on the ranks of this launch."""
    usual: dict[str, Any] = {
        "max_steps": 2,
        "limit_val_batches": 0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "accelerator": "cpu",
        "devices": RANKS,
    }
    return L.Trainer(**(usual | arguments))


def launched_fabric() -> L.Fabric:
    fabric = L.Fabric(accelerator="cpu", devices=RANKS, strategy="ddp")
    fabric.launch()
    return fabric


def mapped_load(file: Any, *given: Any, load: Any = torch.load, **more: Any) -> Any:
    """Map checkpoint files, which no rank may copy to memory; DCP reads parts of open files."""
    assert more.get("mmap") or not isinstance(file, str | Path), file
    return load(file, *given, **more)


#: Lightning validates under `no_grad` with gloo, and in `inference_mode` under NCCL. Its loops ask
#: for the backend here; collectives stay those of gloo.
loops_of_nccl = patch.object(utilities, "dist", SimpleNamespace(get_backend=lambda: "nccl"))


@loops_of_nccl
@patch.object(torch, "load", mapped_load)
def as_under_nccl(run_dir: str, strategy: str, *given: str) -> None:
    """Fit, and validate again: rank 0 leaves that loss in summary.json. Then `validate`, which
    prints it."""
    args = ["--config", str(STRATEGIES[strategy]), *CPU, *given, "--trainer.devices", str(RANKS)]
    fit = ["fit", *args, "--run_dir", run_dir, "--ckpt_path", "last"]
    assert main(fit) == 0
    distributed.barrier()
    summary = Path(run_dir, "summary.json")
    if RANK == 0:
        before = json.loads(summary.read_text())["val_loss"]
        summary.unlink()  # as if killed after the last step
    distributed.barrier()
    assert main(fit) == 0
    if RANK == 0:
        assert abs(json.loads(summary.read_text())["val_loss"] - before) < 1e-6
    if RANKS > 1:  # one node does not see the checkpoint yet
        seen = find_last_checkpoint if RANK == 0 else (lambda run_dir: None)
        with patch("lightning_sv.lit.checkpoint.resumed.find_last_checkpoint", seen):
            assert main([*fit, "--trainer.max_steps", "9"]) == 2
    assert (
        main(["validate", *args, "--ckpt_path", f"{run_dir}/checkpoints/last.ckpt", "--json"]) == 0
    )


def own_trainer(out: str, corpus: str) -> None:
    """A Trainer of your own under FSDP2 with sharded checkpoints."""
    module = PretrainModule(SIZES, lr=1e-3)
    data = TokenDataModule(corpus, seq_len=16, batch_size=1, val_sequences=5)
    saved = ModelCheckpoint(
        out, filename="{step}", every_n_train_steps=2, monitor="sharpness/all/lambda_max"
    )
    norms = LambdaCallback(
        on_train_end=lambda trainer, module: write_scalars(
            trainer, {"norm": module.net.embed.weight.detach().norm()}
        )
    )
    trainer = trainer_of(
        enable_checkpointing=True,
        callbacks=[TrainingMonitor(1), Sharpness(points=2), saved, norms],
        strategy=FullyShardedStrategy(save_distributed_checkpoint=True),
    )
    trainer.fit(module, data)
    assert is_sharded(saved.best_model_path)
    trainer.save_checkpoint(f"{out}/after.ckpt")
    assert is_sharded(f"{out}/after.ckpt")
    loaded = PretrainModule.load_from_checkpoint(
        f"{out}/after.ckpt", map_location="cpu", weights_only=True
    )
    trained: Any = module.net.embed.weight
    assert torch.equal(loaded.net.embed.weight, trained.full_tensor())
    probe = Sharpness(points=2, loss=lambda module: module.net.embed.weight.square().sum())
    with pytest.raises(ConfigError, match="Sharpness is sharded"):
        probe.on_fit_start(trainer, module)
    metrics: list[dict[str, float]] = [{}] * trainer.world_size
    written = {k: float(v) for k, v in trainer.callback_metrics.items() if k != "train/loss"}
    distributed.all_gather_object(metrics, written)
    assert written.keys() >= {"sharpness/seconds", "memory/peak_gib"} and metrics == [
        written
    ] * len(metrics)


@loops_of_nccl
def fitted_again(out: str, corpus: str) -> None:
    """A validation before each fit changes no weight. Weights alone are no checkpoint to resume."""
    trained: list[torch.Tensor] = []
    for validates in (False, True):
        module = PretrainModule(SIZES, lr=1e-3, seed=0)
        data = TokenDataModule(corpus, seq_len=16, batch_size=1, val_sequences=2)
        saved = ModelCheckpoint(
            f"{out}/{validates}", every_n_train_steps=1, save_weights_only=True, save_top_k=-1
        )
        trainer = trainer_of(
            limit_val_batches=1,
            enable_checkpointing=True,
            callbacks=[saved],
            strategy=FullyShardedStrategy(save_distributed_checkpoint=True),
        )
        for steps in (1, 2):
            if validates:
                trainer.validate(module, data, verbose=False)
            trainer.fit_loop.epoch_loop.max_steps = steps
            trainer.fit(module, data)
        weight: Any = module.net.embed.weight
        trained.append(weight.detach().full_tensor())
    assert torch.equal(*trained)

    weights = saved.best_model_path
    trainer.test(module, data, ckpt_path=weights, weights_only=True, verbose=False)
    with pytest.raises(ConfigError, match="weights"):
        trainer.fit(module, data, ckpt_path=weights, weights_only=True)


def folders(out: str) -> None:
    """A shared folder is left empty. The same path on a disk of each node, and a folder in which a
    rank cannot create a link, are refused on all ranks."""
    fabric = launched_fabric()
    strategy: Any = fabric.strategy
    shared = Path(out, "run/checkpoints")
    check_shared_folder(strategy, shared)
    fabric.barrier()
    assert list(shared.iterdir()) == []
    problem = "No space left on device"
    error = OSError(errno.ENOSPC, problem) if RANK == 1 else None  # the other rank links nothing
    with (
        patch.object(Path, "symlink_to", side_effect=error),
        pytest.raises(ConfigError, match=rf"^run_dir is .* \({problem}\);"),
    ):
        check_shared_folder(strategy, shared)
    disk = Path(out, f"disk-{RANK}")
    disk.mkdir()
    os.chdir(disk)
    with pytest.raises(ConfigError, match="^run_dir is run;"):
        check_shared_folder(strategy, Path("run/checkpoints"))


def failed_writes(out: str) -> None:
    """A full disk of rank 0, a shard that is lost, and one that its rank cannot read back are
    errors on all ranks, and leave no part of the checkpoint."""
    fabric = launched_fabric()

    def lose(file: Path) -> str:
        if file.name == "__1_0.distcp":
            file.unlink()
        return "digest"

    def fail(file: Path) -> str:
        if file.name == "__1_0.distcp":
            raise OSError(errno.EIO, "Input/output error", str(file))
        return "digest"

    with file_size_limit(0) if RANK == 0 else nullcontext():
        write_fails(fabric, Path(out), "File too large")
    for read_back, reason in ((lose, "__1_0.distcp is missing"), (fail, "Input/output error")):
        with patch.object(sharded_write, "file_sha256", read_back):
            write_fails(fabric, Path(out), reason)


def write_fails(fabric: L.Fabric, folder: Path, reason: str) -> None:
    strategy: Any = fabric.strategy
    path = folder / "checkpoints" / "step-1.ckpt"
    message = rf"could not write .*step-1\.ckpt \({reason}.*\); earlier checkpoints are"
    checkpoint = {"state_dict": {f"weight{RANK}": torch.ones(3)}}
    with pytest.raises(OSError, match=message):
        sharded_write.write_sharded(strategy, checkpoint, path)
    fabric.barrier()
    assert list(path.parent.iterdir()) == []
    fabric.barrier()  # before the next write begins


def default_samplers(out: str, corpus: str) -> None:
    """Lightning's and Fabric's settings for samplers leave the split of the data module alone."""
    alone = TokenDataModule(corpus, seq_len=16, batch_size=4, val_sequences=5, seed=0)
    one_device = iter(alone.train_dataloader())
    steps = [next(one_device) for _ in range(2)]
    held_out = alone.settings.held_out(5)

    for overfit in (0, 2):
        seen: list[torch.Tensor] = []
        note = LambdaCallback(
            on_train_batch_start=lambda trainer, module, batch, i, seen=seen: seen.append(batch)
        )
        trainer = trainer_of(overfit_batches=overfit, callbacks=[note], strategy="ddp")
        module = PretrainModule(SIZES, lr=1e-3)
        data = TokenDataModule(corpus, seq_len=16, batch_size=2, val_sequences=5, seed=0)
        trainer.fit(module, data)
        assert torch.equal(torch.stack(joined(seen)), torch.stack(steps)), overfit

    fabric = launched_fabric()
    data = TokenDataModule(corpus, seq_len=16, batch_size=2, val_sequences=5, seed=0)
    with pytest.raises(ConfigError, match="setup"):
        data.train_dataloader()
    data.setup("fit")
    train, held = fabric.setup_dataloaders(data.train_dataloader(), data.val_dataloader())
    reads = iter(train)
    assert torch.equal(torch.stack(joined([next(reads) for _ in range(2)])), torch.stack(steps))
    assert torch.equal(torch.cat(list(held)), held_out[RANK::2])


def joined(batches: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return each batch joined over all ranks."""
    gathered: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(gathered, batches)
    return [torch.cat(parts) for parts in zip(*gathered, strict=True)]


def own_weights(out: str, corpus: str) -> None:
    """Without a seed, weights that exist before a fit, and those that a fit creates, are rank 0's
    on all devices."""
    for exist in (True, False):
        module = PretrainModule(SIZES, lr=1e-3)
        weights: list[Any] = []
        if exist:
            module.configure_model()
            weights.append(module.net.embed.weight.detach().clone())

        def look(trainer: Any, module: Any, weights: list[Any] = weights) -> None:
            weights.append(module.net.embed.weight.detach().full_tensor().clone())

        fit = trainer_of(
            callbacks=[LambdaCallback(on_train_start=look, on_train_end=look)],
            strategy=FullyShardedStrategy(),
            default_root_dir=out,
        )
        data = TokenDataModule(corpus, seq_len=16, batch_size=1)
        fit.fit(module, data)
        ranks: list[Any] = [None] * RANKS
        distributed.all_gather_object(ranks, weights)
        trained = [each[exist:] for each in ranks]
        assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True)), exist
        assert not exist or torch.equal(ranks[0][0], ranks[0][1])
        assert not torch.equal(*trained[0])


def saved_before_a_step(out: str, corpus: str, alone: str) -> None:
    """A checkpoint without a step, also one of one process, changes no step, neither when saved nor
    when resumed."""

    def updates(
        name: str, save: str = "", resume: str | None = None, *, sharded: bool = False
    ) -> torch.Tensor:
        module = PretrainModule(SIZES, optim=OptimConfig(name, lr=1e-2), seed=0)
        first = LambdaCallback(
            on_train_start=lambda trainer, module: save and trainer.save_checkpoint(save)
        )
        fit = trainer_of(
            callbacks=[first],
            strategy=FullyShardedStrategy(save_distributed_checkpoint=sharded),
            default_root_dir=out,
        )
        data = TokenDataModule(corpus, seq_len=16, batch_size=1)
        fit.fit(module, data, ckpt_path=resume, weights_only=True)
        start = Backbone(module.settings.backbone, module.settings.strategy, seed=0).state_dict()
        trained = {name: value.full_tensor() for name, value in module.net.state_dict().items()}
        return torch.cat([(value - start[name]).flatten() for name, value in trained.items()])

    for name in ("adamw", "sgd"):
        expected = updates(name)
        for sharded in (False, True):
            path = f"{out}/{name}-{sharded}.ckpt"
            resume = alone if name == "adamw" and not sharded else path
            for found in (updates(name, path, sharded=sharded), updates(name, resume=resume)):
                assert (found - expected).norm() < 1e-2 * expected.norm(), (name, sharded)


def sharded_checkpoints(die_at: str, *args: str) -> int:
    """Fit from the weights of one process, with sharded checkpoints; the last rank is killed before
    that step."""
    start = PretrainModule.on_train_start

    def checked_start(self: PretrainModule) -> None:
        start(self)
        made = self.settings
        sharded = self.net.state_dict()
        unsharded = Backbone(
            made.backbone, made.strategy, made.scale_options, seed=made.seed or torch.initial_seed()
        )
        if self.global_step == 0:
            for name, value in unsharded.state_dict().items():
                assert torch.equal(full_tensor(sharded[name]), value), name

    def die(self: PretrainModule, batch: Any, batch_idx: int) -> None:
        if self.global_step == int(die_at) and self.global_rank == self.trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    PretrainModule.on_train_start = checked_start
    PretrainModule.on_train_batch_start = die
    return main(["fit", *args])


def one_rank_differs(count: str, *words: str) -> None:
    """Fit is refused; the last rank has these further words, or a different commit."""
    own = words[: int(count)]
    fit = ["fit", *words[int(count) :]]
    if RANK == 0:
        code = main(fit)
    elif own == ("COMMIT",):
        with patch("lightning_sv.lit.same_run.commit", lambda: "0" * 40):
            code = main(fit)
    else:
        code = main([*fit, *own])
    sys.stderr.flush()
    os._exit(code != 2)  # a rank that fails would end the other


if __name__ == "__main__":
    task, *words = sys.argv[1:]
    sys.exit(globals()[task](*words))
