"""A Trainer of your own under FSDP2 with sharded checkpoints: `torchrun -m tests.lit.own_trainer OUT CORPUS`."""

import os
import sys
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import distributed

from lightning_sv import BackboneConfig, PretrainModule, Sharpness, TokenDataModule
from lightning_sv.callbacks import TrainingMonitor
from lightning_sv.lit.fsdp import FullyShardedStrategy
from lightning_sv.runs.sharded_checkpoint import is_sharded


def run(out: Path, corpus: str) -> None:
    module = PretrainModule(BackboneConfig(d_model=16, n_layer=1, n_head=2, vocab_size=300), lr=1e-3)
    data = TokenDataModule(corpus, seq_len=16, batch_size=1, val_sequences=5)
    saved = ModelCheckpoint(out, filename="{step}", every_n_train_steps=2, monitor="sharpness/all/lambda_max")
    trainer = L.Trainer(
        max_steps=2, limit_val_batches=0, callbacks=[TrainingMonitor(1), Sharpness(points=2), saved], logger=False,
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), enable_progress_bar=False,
        strategy=FullyShardedStrategy(save_distributed_checkpoint=True), use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, data)
    assert is_sharded(saved.best_model_path)
    trainer.save_checkpoint(out / "after.ckpt")
    assert is_sharded(out / "after.ckpt")
    metrics: list[dict[str, float]] = [{}] * trainer.world_size
    written = {k: float(v) for k, v in trainer.callback_metrics.items() if k != "train/loss"}
    distributed.all_gather_object(metrics, written)
    assert written.keys() >= {"sharpness/seconds", "memory/peak_gib"} and metrics == [written] * len(metrics)
    predicted = trainer.predict(module, data)
    assert predicted and sum(map(len, predicted)) == (6 - trainer.global_rank) // 2  # of five sequences


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2])
