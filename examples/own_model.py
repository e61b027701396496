"""Your own model with a strategy: attention with shared keys, a squared ReLU, bytes of Python.

    python examples/own_model.py --scale llama unified --steps 200

Strategies start from the same matrices and read the same batches. Needs only torch; 20 seconds on a
CPU.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sv.optim import role_groups
from lightning_sv.scale import Branch, ScaleBuilder, ScaleStrategy

D = 64
N_HEAD = 8
N_KEY_HEAD = 2
N_LAYER = 2
SEQ_LEN = 64
BATCH = 16
N_VALIDATION = 256  # sequences


class GroupedQueryAttention(nn.Module):
    """Causal attention: n_head heads of queries on n_key_head heads of keys and values."""

    def __init__(self, d: int, n_head: int, n_key_head: int, build: ScaleBuilder):
        super().__init__()
        self.d_head = d // n_head
        queries = Branch(d, dnp_width=self.d_head)
        keys = Branch(n_key_head * self.d_head, dnp_width=self.d_head)
        self.qkv = build.group("attn_norm", d, {"q_proj": queries, "k_proj": keys, "v_proj": keys})
        self.o_proj = nn.Linear(d, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D), without positions: only the causal mask distinguishes them."""
        q, k, v = (y.unflatten(-1, (-1, self.d_head)).transpose(1, 2) for y in self.qkv(x))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class SquaredReLU(nn.Module):
    """down_proj(relu(up)^2): one branch; under `dnp` its norm covers all hidden units."""

    def __init__(self, d: int, build: ScaleBuilder):
        super().__init__()
        self.up = build.group("ffn_norm", d, {"up_proj": Branch(4 * d, dnp_width=4 * d)})
        self.down_proj = nn.Linear(4 * d, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        (up,) = self.up(x)
        return self.down_proj(up.relu().square())


class ByteModel(nn.Module):
    """Logits of the next byte."""

    def __init__(self, build: ScaleBuilder):
        super().__init__()
        self.embed = nn.Embedding(256, D)
        self.layers = nn.ModuleList()
        for _ in range(N_LAYER):
            self.layers.append(GroupedQueryAttention(D, N_HEAD, N_KEY_HEAD, build))
            self.layers.append(SquaredReLU(D, build))
        self.head = build.group(
            "final_norm", D, {"lm_head": Branch(256, dnp_width=256, role="head")}
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) -> (B, T, 256)."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        (logits,) = self.head(x)
        return logits


def blocks() -> Tensor:
    """Return bytes of Python's standard library in a fixed order, (n, SEQ_LEN + 1)."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = bytearray(b"".join(file.read_bytes() for file in files)[:2_000_000])
    ids = torch.frombuffer(text, dtype=torch.uint8).long()
    rows = ids.unfold(0, SEQ_LEN + 1, SEQ_LEN + 1)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    return rows[order]


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the loss of the next byte in nats."""
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def train(scale: str, rows: Tensor, steps: int) -> float:
    """Return the validation loss after some steps of AdamW, decay by role."""
    strategy = ScaleStrategy.parse(scale)
    build = ScaleBuilder(strategy)
    torch.manual_seed(0)
    model = ByteModel(build)
    build.finish()  # warns if a simpler strategy gives the same model
    groups = [group.options("adamw", 0.1) for group in role_groups(model, strategy.decayed_roles)]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 3e-3, steps, pct_start=0.1, cycle_momentum=False
    )
    validation_rows = rows[:N_VALIDATION]
    train_rows = rows[N_VALIDATION:]
    for step in range(steps):
        chosen = torch.arange(step * BATCH, (step + 1) * BATCH) % len(train_rows)
        optimizer.zero_grad()
        loss(model, train_rows[chosen]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return loss(model, validation_rows).item()


def main() -> None:
    """Train a model for each strategy and print its loss."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--scale",
        nargs="+",
        default=["llama", "unified"],
        help="Strategies. (default: %(default)s)",
    )
    parser.add_argument(
        "--steps", type=int, default=200, help="Number of steps of each. (default: %(default)s)"
    )
    options = parser.parse_args()
    rows = blocks()
    for scale in options.scale:
        final_loss = train(scale, rows, options.steps)
        print(f"{scale:<16} {final_loss:.3f} nats per byte after {options.steps} steps")


if __name__ == "__main__":
    main()
