"""Callbacks, strategy and decay by role in your own LightningModule: 20 seconds on a CPU."""

from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional as F

from lightning_sv import BranchNorms, Sharpness, TrainingMonitor, apply_strategy, param_groups

EXAMPLE = torch.zeros(1, 8, dtype=torch.long)  # any batch of token ids


class Net(nn.Module):
    """A language model of one gated layer, without scale vectors."""

    def __init__(self, vocab_size: int = 256, width: int = 32):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.norm = nn.RMSNorm(width)
        self.gate_proj = nn.Linear(width, 2 * width, bias=False)
        self.up_proj = nn.Linear(width, 2 * width, bias=False)
        self.down_proj = nn.Linear(2 * width, width, bias=False)
        self.final_norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits (B, T, V)."""
        x = self.embed(tokens)
        y = self.norm(x)
        x = x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))
        logits: torch.Tensor = self.head(self.final_norm(x))
        return logits


class OwnModule(L.LightningModule):
    """A usual LightningModule with two new calls."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        apply_strategy(self.net, "hg+dp+or+iwd", example=EXAMPLE)  # new

    def training_step(self, block: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Return the next-token loss of a (B, T + 1) block."""
        logits = self.net(block[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), block[:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Decay the parameters of the strategy's decayed roles."""
        groups = param_groups(
            self.net, 3e-3, weight_decay=0.1, policy="iwd", example=EXAMPLE
        )  # new
        return torch.optim.AdamW(groups)


def main(out: str = "out", steps: int = 60) -> None:
    """Train on the bytes of this file."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    blocks = text.unfold(0, 33, 8)
    module = OwnModule()
    probe = Sharpness(
        ("all", "scale_input"), points=3, loss=lambda user: user.training_step(blocks[:16], 0)
    )
    trainer = L.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=CSVLogger(out),
        enable_checkpointing=False,
        log_every_n_steps=10,
        callbacks=[TrainingMonitor(), BranchNorms(10, model="net"), probe],
    )
    trainer.fit(module, torch.utils.data.DataLoader(blocks, batch_size=16, shuffle=True))
    loss = float(trainer.callback_metrics["loss"])
    print(f"loss {loss:.3f} nats per byte; norms of every branch in {trainer.log_dir}/metrics.csv")


if __name__ == "__main__":
    main()
