"""A small module, its batches, and a plain `lightning.Trainer` for it."""

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sv import BackboneConfig, PretrainModule, TokenDataModule
from lightning_sv.nn import RouterConfig

EXAMPLES = Path(__file__).parents[2] / "examples"
OWN_MODULE = EXAMPLES / "own_lightning_module.py"
SIZES = BackboneConfig(d_model=16, n_layer=1, n_head=2, vocab_size=300)
MIXTURE = BackboneConfig(
    d_model=16, n_layer=1, n_head=2, vocab_size=300, n_expert=3, n_expert_active=2
)
BIASED = replace(MIXTURE, router=RouterConfig(balance="bias", bias_rate=0.01))
EPOCHS = {"max_steps": -1, "max_epochs": 2, "val_check_interval": None}


def trainer(out: Path, *callbacks: L.Callback, **changes: Any) -> L.Trainer:
    made: dict[str, Any] = {
        "max_steps": 4,
        "accelerator": "cpu",
        "devices": 1,
        "log_every_n_steps": 1,
        "val_check_interval": 2,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(**{**made, "logger": CSVLogger(out), "callbacks": list(callbacks), **changes})


def rows(out: Path) -> list[dict[str, str]]:
    with next(out.rglob("metrics.csv")).open() as file:
        return list(csv.DictReader(file))


def column(out: Path, tag: str) -> list[float]:
    """Return the logged values of a tag, in order."""
    return [float(row[tag]) for row in rows(out) if row.get(tag)]


def small_data(corpus: Path) -> TokenDataModule:
    return TokenDataModule(corpus, seq_len=8, batch_size=2, val_sequences=8, seed=0)


def module(**changes: Any) -> PretrainModule:
    return PretrainModule(
        **{"backbone": SIZES, "scale": "hg+dp+or", "lr": 0.01, "seed": 0, **changes}
    )


def blocks(n: int = 12) -> Tensor:
    return torch.randint(0, 300, (n, 9), generator=torch.Generator().manual_seed(0))


def loader() -> Any:
    return DataLoader(blocks(), batch_size=2)


def noted(hook: str, value: Callable[..., Any]) -> tuple[list[Any], L.Callback]:
    """Return a list and a callback that appends `value` of the arguments of this hook."""
    found: list[Any] = []
    return found, LambdaCallback(**{hook: lambda *given: found.append(value(*given))})


def tags(out: Path) -> set[str]:
    """Return the names of all logged values."""
    names: set[str] = set()
    for row in rows(out):
        names |= {tag for tag, value in row.items() if value}
    return names
