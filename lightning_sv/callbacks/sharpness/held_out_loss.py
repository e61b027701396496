"""The held-out loss of a `PretrainModule`, measured on an eager float32 copy of its weights.

Training may therefore be compiled, sharded, in bfloat16 and with fused attention. All ranks take
part in gathering the weights, and the first one computes.
"""

import logging
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_sv.callbacks.held_out_probe import documents_of
from lightning_sv.callbacks.run_state import has_known_model, model_of
from lightning_sv.callbacks.sharpness.measure import MeasuredLoss, Measurement
from lightning_sv.callbacks.sharpness.model_copy import plain_copy
from lightning_sv.callbacks.sharpness.subsets import parameter_subsets
from lightning_sv.errors import ConfigError
from lightning_sv.nn import BackboneConfig, next_token_loss

log = logging.getLogger(__name__)

#: Limit on the attention entries (blocks x heads x queries x keys) of one sequence: math attention
#: keeps about six float32 copies of each in the retained graph, 18 GB in total.
MOST_ATTENTION = 750_000_000


def fitting_length(config: BackboneConfig, seq_len: int) -> int:
    """Return the tokens of a sequence in a measurement: all, or 1/2, 1/4, ... of them.

    >>> fitting_length(BackboneConfig(d_model=1792, n_layer=22, n_head=28), 4096)
    1024
    """
    n_matrices = config.n_layer * config.n_head
    while n_matrices * seq_len**2 > MOST_ATTENTION and seq_len > 1:
        seq_len //= 2
    return seq_len


class HeldOutLoss(MeasuredLoss):
    """The loss of one fixed batch, spread over the validation split.

    Args:
        measurement: what is measured, and how
        sequences: batch size
    """

    def __init__(self, measurement: Measurement, sequences: int):
        self.measurement = measurement
        self.sequences = sequences
        self._blocks = Tensor()  # sequences T+1, on rank 0 from the start of training

    def check(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Raise ConfigError if the module or the data are not ours, which have this loss."""
        if not has_known_model(trainer, module):
            expected = "a function of the LightningModule."
            hint = (
                "Only a PretrainModule with a TokenDataModule has a default, and only without a "
                "configure_model of its own."
            )
            raise ConfigError(f"loss of Sharpness is None; expected {expected} {hint}")

    def start(self, trainer: Any, module: Any) -> None:
        """Read the batch, without the ends of long sequences."""
        if not trainer.is_global_zero:
            return
        data = trainer.datamodule.settings
        length = fitting_length(module.settings.backbone, data.seq_len)
        blocks = data.held_out(self.sequences)[:, : length + 1]
        self._blocks = blocks.to(module.device)

        batch = f"{len(blocks)} held-out sequences"
        if length < data.seq_len:
            reason = f"math attention on {data.seq_len:,} is too large"
            batch += f", of their first {length:,} tokens ({reason})"
        log.info("sharpness: %s; math attention, on an eager float32 copy", batch)

    def figures(self, trainer: L.Trainer, module: Any) -> dict[str, float]:
        """Measure on the first rank; other ranks return nothing."""
        meta = module.settings.plan.meta()
        model = plain_copy(model_of(module), meta, module.device, keep=trainer.is_global_zero)
        if model is None:
            return {}
        tokens = self._blocks[:, :-1]  # B T
        targets = self._blocks[:, 1:]  # B T
        documents = documents_of(tokens, trainer, module)

        def loss() -> Tensor:
            return next_token_loss(model(tokens, documents), targets)

        with torch.autocast(module.device.type, enabled=False):
            figures = self.measurement.figures(parameter_subsets(model), loss)
        return figures | {"sequences": len(self._blocks)}
