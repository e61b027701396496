"""Pre-train with your own Trainer: `python examples/lightning_trainer.py`, half a minute on a CPU.

Prepare the corpus first: `make data`, or `lightning-sv prepare`.
"""

import sys

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_sv import BranchNorms, PretrainModule, Sharpness, TokenDataModule


def main(corpus: str = "data/stdlib", out: str = "out", steps: int = 200) -> None:
    """Train a tiny Llama with scale vectors, load its best checkpoint, print logits' shape."""
    # or PretrainModule(backbone=..., scale=..., lr=...)
    module = PretrainModule.from_preset("tiny", scale="hg+dp+or")
    data = TokenDataModule(corpus, seq_len=64, batch_size=8)
    trainer = L.Trainer(
        max_steps=steps,
        val_check_interval=50,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=CSVLogger(out),
        callbacks=[
            ModelCheckpoint(monitor="val/loss"),
            EarlyStopping("val/loss"),
            BranchNorms(),
            Sharpness(),
        ],
    )
    trainer.fit(module, data)
    print("val/loss", float(trainer.callback_metrics["val/loss"]))

    best = trainer.checkpoint_callback.best_model_path
    restored = PretrainModule.load_from_checkpoint(best, weights_only=True)
    blocks = next(iter(data.val_dataloader()))  # (B, T + 1) token ids
    logits = restored(blocks[:, :-1].to(restored.device))
    print("logits", tuple(logits.shape))


if __name__ == "__main__":
    main(*sys.argv[1:3])
