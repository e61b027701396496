"""Text that the model writes while it is trained, in TensorBoard's Text page."""

import time
from contextlib import nullcontext

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_sv.callbacks.run_state import data_of, model_of, settings_of
from lightning_sv.callbacks.training_monitor import axis, pause_throughput
from lightning_sv.corpus import Tokenizer
from lightning_sv.errors import ConfigError
from lightning_sv.lit.generate import Sampling, generate
from lightning_sv.nn import Backbone


class TextSamples(L.Callback):
    """Logs a continuation of a prompt after every validation; none where `tokens` is 0.

    It is drawn from a generator of its own and changes nothing of the run: losses and weights are the same bits.

    Args:
        tokens: to draw each time at most, each a pass over `data.seq_len` tokens or fewer; 0 for no samples
        prompt: text to continue; empty for the start of a document
        temperature: 0 takes the most likely token
        top_k: draw among this many most likely tokens

    Raises:
        ConfigError: a number out of range
    """

    def __init__(self, tokens: int = 0, prompt: str = "", temperature: float = 0.8, top_k: int = 50):
        if tokens < 0:
            raise ConfigError(f"samples.tokens is {tokens}; give 0 for none, or how many to draw.")
        self._prompt = prompt
        self._sampling = None if tokens == 0 else Sampling(tokens, temperature, top_k)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Check that the tokenizer is known."""
        is_ours = settings_of(pl_module) is not None and data_of(trainer) is not None
        if self._sampling is not None and not is_ours:
            raise ConfigError("TextSamples needs a PretrainModule and a TokenDataModule.")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write one; on every device, as a sharded model needs them all."""
        if self._sampling is None or trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        settings, data = settings_of(pl_module), data_of(trainer)
        assert settings is not None and data is not None
        net = model_of(pl_module)
        assert isinstance(net, Backbone)
        began = time.perf_counter()
        tokenizer = Tokenizer.load(data.corpus.dir)
        compiled = settings.compile != "none"
        # Other lengths than the trained one would be compiled each, and the training step perhaps anew.
        with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
            text = generate(net, tokenizer, self._prompt, self._sampling, context=data.seq_len)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("sample", _verbatim(self._prompt + text), axis(logger, trainer))
        pause_throughput(trainer, time.perf_counter() - began)


def _verbatim(text: str) -> str:
    """Markdown that shows `text` as it is."""
    return "".join(f"    {line}\n" for line in text.split("\n"))
