"""Text sampled during training, on TensorBoard's Text page."""

from typing import Any

import lightning as L

from lightning_sv.callbacks.logging import axis
from lightning_sv.callbacks.measuring import measuring
from lightning_sv.callbacks.run_state import (
    data_of,
    has_known_model,
    is_fitting,
    model_of,
    settings_of,
)
from lightning_sv.callbacks.tensorboard_layout import tag_of, tensorboard_loggers
from lightning_sv.corpus import Tokenizer
from lightning_sv.errors import ConfigError, expect
from lightning_sv.lit.generate import Sampling, generate


class TextSamples(L.Callback):
    """Log a continuation of a prompt to TensorBoard after every validation.

    Sampling uses a private generator and does not affect the run: losses and weights are bitwise
    equal.

    Args:
        tokens: maximum number of tokens per sample, each a forward pass over at most `data.seq_len`
            tokens; 0 for none
        prompt: text to continue; empty for the start of a document
        temperature: sampling temperature; 0 for the most likely token
        top_k: number of most likely tokens to sample from; None for all

    Raises:
        ConfigError: a number out of range
    """

    def __init__(
        self, tokens: int = 60, prompt: str = "", temperature: float = 0.8, top_k: int | None = 50
    ):
        expected = "the number of tokens per sample, or 0 for none."
        expect(tokens >= 0, "tokens of TextSamples", tokens, expected)
        self._prompt = prompt
        self._sampling = None if tokens == 0 else Sampling(tokens, temperature, top_k)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Check before training that the model and its tokenizer are known."""
        if stage != "fit" or self._sampling is None:
            return
        if not has_known_model(trainer, pl_module):  # a model of the user need not be able to
            expected = "a PretrainModule and a TokenDataModule, or tokens=0"
            raise ConfigError(f"TextSamples is set; expected {expected}.")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log one sample, on every device, because a sharded model needs them all."""
        if self._sampling is None or not is_fitting(trainer):
            return
        with measuring(trainer), trainer.precision_plugin.forward_context():
            text = self._prompt + self._sample(self._sampling, trainer, pl_module)
        lines = [f"    {line}\n" for line in text.split("\n")]  # Markdown shows them as they are
        verbatim = "".join(lines)
        for logger in tensorboard_loggers(trainer):
            tag = tag_of(logger, "sample")
            logger.experiment.add_text(tag, verbatim, axis(logger, trainer))

    def _sample(self, sampling: Sampling, trainer: L.Trainer, pl_module: L.LightningModule) -> str:
        """Return a continuation of the prompt."""
        net: Any = model_of(pl_module)
        data: Any = data_of(trainer)
        settings: Any = settings_of(pl_module)
        return generate(
            net,
            Tokenizer.load(data.folder),
            self._prompt,
            sampling,
            context=data.seq_len,
            mask_documents=settings.mask_documents,
            broadcast=trainer.strategy.broadcast,
        )
