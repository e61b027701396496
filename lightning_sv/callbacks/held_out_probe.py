"""Base of callbacks that measure a model on held-out sequences during a run."""

from collections.abc import Iterator
from typing import Any

import lightning as L
from torch import Tensor, nn

from lightning_sv.callbacks.measuring import measuring
from lightning_sv.callbacks.run_state import data_of, evaluation_mode, model_of, settings_of
from lightning_sv.callbacks.step_callback import StepCallback
from lightning_sv.callbacks.steps import known_steps
from lightning_sv.errors import ConfigError
from lightning_sv.nn import document_ids
from lightning_sv.scale.shapes import Int

#: Tokens per forward pass; the float32 logits of a pass are kept in memory.
TOKENS_PER_PASS = 16_384


class HeldOutProbe(StepCallback):
    """Measure the model on the same held-out sequences, at evenly spaced steps of a run.

    A measurement samples no random numbers, and changes neither weights nor gradients. A subclass
    defines `measure`, and documents the arguments.
    """

    def __init__(self, points: int, sequences: int, model: str | None):
        super().__init__(model=model)
        self.expect_at_least("points", points, 1)
        self.expect_at_least("sequences", sequences, 1)
        self.points = points
        self.sequences = sequences
        self._block = Tensor()  # B T+1, from the start of training
        self._documents: Tensor | None = None

    def measure(
        self, model: nn.Module, block: Int[Tensor, "B S"], documents: Int[Tensor, "B S"] | None
    ) -> dict[str, float] | dict[str, Tensor]:
        """Return the figures of `model`, in evaluation mode, on (B, T + 1) held-out token ids.

        `documents` has the number of each token's document if attention is restricted to it.
        """
        raise NotImplementedError

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Check that the data are token batches, and that the model has a forward.

        Raises:
            ConfigError: they are not, or it has none
        """
        if data_of(trainer) is None:
            found = repr(trainer.datamodule)  # type: ignore[attr-defined]
            expected = f"a TokenDataModule for {self.name}."
            raise ConfigError(f"datamodule is {found}; expected {expected}")

        model = model_of(pl_module, self.model)
        if type(model).forward in (nn.Module.forward, L.LightningModule.forward):
            found = f"{self.model}, and {type(model).__name__} has no forward"
            expected = "the name of the submodule that maps token ids to logits"
            raise ConfigError(f"model of {self.name} is {found}; expected {expected}.")

    def chosen_steps(self, trainer: L.Trainer) -> list[int]:
        """Return evenly spaced steps after the first one, the last at the end of the run."""
        total = known_steps(trainer, self.name)
        steps = {i * total // self.points for i in range(1, self.points + 1)}
        return sorted(steps - {0})  # of more points than steps, the first are 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Read the sequences, and choose the steps."""
        data = data_of(trainer)
        assert data is not None
        self._block = data.held_out(self.sequences).to(pl_module.device)
        self._documents = documents_of(self._block, trainer, pl_module)
        super().on_train_start(trainer, pl_module)

    def act(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Measure, and write the figures."""
        model = model_of(pl_module, self.model)
        forward_context = trainer.precision_plugin.forward_context()
        with measuring(trainer), forward_context, evaluation_mode(model):
            figures = self.measure(model, self._block, self._documents)
        self.write(trainer, figures)


def passes(
    block: Int[Tensor, "B S"], documents: Int[Tensor, "B S"] | None
) -> Iterator[tuple[Tensor, ...]]:
    """Split sequences, and their documents if they are given, into forward passes.

    A pass has at most `TOKENS_PER_PASS` tokens, but at least one sequence.
    """
    inputs = [block]
    if documents is not None:
        inputs.append(documents)
    n_sequences = max(1, TOKENS_PER_PASS // block.shape[1])
    chunks = [part.split(n_sequences) for part in inputs]
    return zip(*chunks, strict=True)


def documents_of(
    block: Int[Tensor, "B S"], trainer: L.Trainer, module: L.LightningModule
) -> Int[Tensor, "B S"] | None:
    """Return the document of each token if the model restricts attention to it; None otherwise."""
    data = data_of(trainer)
    settings = settings_of(module)
    if data is None or settings is None:
        return None
    if not settings.mask_documents:
        return None
    return document_ids(block, data.manifest.eot)
