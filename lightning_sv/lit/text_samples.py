"""Text sampled during training, on TensorBoard's Text page."""

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_sv.callbacks.logging import axis, measuring
from lightning_sv.callbacks.run_state import data_of, model_of, settings_of
from lightning_sv.callbacks.tensorboard_layout import tag_of
from lightning_sv.corpus import Tokenizer
from lightning_sv.errors import ConfigError, expect
from lightning_sv.lit.generate import Sampling, generate
from lightning_sv.nn import Backbone


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
        expect(
            tokens >= 0,
            "tokens of TextSamples",
            tokens,
            "the number of tokens per sample, or 0 for none.",
        )
        self._prompt = prompt
        self._sampling = None if tokens == 0 else Sampling(tokens, temperature, top_k)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Check before training that the model and its tokenizer are known."""
        plain = getattr(pl_module, "built_by", None) is None  # a model of the user may not generate
        is_ours = plain and settings_of(pl_module) is not None and data_of(trainer) is not None
        if stage == "fit" and self._sampling is not None and not is_ours:
            raise ConfigError(
                "TextSamples is set; expected a PretrainModule and a TokenDataModule, or tokens=0."
            )

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log one sample, on every device, because a sharded model needs them all."""
        if self._sampling is None or trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        net = model_of(pl_module)
        data = data_of(trainer)
        settings = settings_of(pl_module)
        assert isinstance(net, Backbone) and data is not None and settings is not None
        with measuring(trainer):
            tokenizer = Tokenizer.load(data.folder)
            limits = {"context": data.seq_len, "mask_documents": settings.mask_documents}
            text = generate(net, tokenizer, self._prompt, self._sampling, **limits)  # type: ignore[arg-type]
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                verbatim = "".join(f"    {line}\n" for line in (self._prompt + text).split("\n"))
                logger.experiment.add_text(
                    tag_of(logger, "sample"), verbatim, axis(logger, trainer)
                )
