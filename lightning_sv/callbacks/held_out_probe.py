"""Measurements of a model on held-out sequences during a run: their base, and sizes in the residual stream."""

from contextlib import ExitStack
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_sv.callbacks.run_state import StepTrigger, data_of, evaluation_mode, known_steps, model_of, settings_of
from lightning_sv.callbacks.tensorboard_layout import Pages
from lightning_sv.callbacks.training_monitor import measuring, write_scalars
from lightning_sv.errors import ConfigError, expect
from lightning_sv.nn import document_ids
from lightning_sv.nn.backbone import Block
from lightning_sv.scale.shapes import Int


class HeldOutProbe(L.Callback):
    """Measure the model on the same held-out sequences, at evenly spaced steps of a run.

    A measurement samples no random numbers, and changes neither weights nor gradients. A subclass defines `measure`,
    and documents the arguments.
    """

    def __init__(self, points: int, sequences: int, model: str | None):
        self.name = type(self).__name__
        for key, value in (("points", points), ("sequences", sequences)):
            expect(value >= 1, f"{key} of {self.name}", value, "at least 1.")
        self.points, self.sequences, self.model = points, sequences, model
        self._clock = StepTrigger(self.name)
        self._steps: frozenset[int] = frozenset()
        self._block: Tensor | None = None

    def measure(self, model: nn.Module, block: Int[Tensor, "B S"], eot: int | None) -> dict[str, float]:
        """Return the scalars of `model`, in evaluation mode, on (B, T + 1) held-out token ids.

        `eot` is the id of the end-of-text token if attention is restricted to a document.
        """
        raise NotImplementedError

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Check before training that the data are token batches; raise ConfigError if they are not."""
        if stage == "fit" and data_of(trainer) is None:
            raise ConfigError(f"datamodule is {trainer.datamodule!r}; expected a TokenDataModule for {self.name}.")  # type: ignore[attr-defined]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Read the sequences."""
        self._clock.start(trainer)
        total = known_steps(trainer, self.name)
        self._steps = frozenset(i * total // self.points for i in range(1, self.points + 1))
        data = data_of(trainer)
        assert data is not None
        self._block = data.held_out(self.sequences).to(pl_module.device)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Measure when due, on every device, because a sharded model needs all of them."""
        if not self._clock.ended(trainer) or not self._clock.has_passed(self._steps):
            return
        data, settings = data_of(trainer), settings_of(pl_module)
        assert self._block is not None and data is not None
        model = model_of(pl_module, self.model)
        eot = data.manifest.eot if settings is not None and settings.mask_documents else None
        with measuring(trainer), trainer.precision_plugin.forward_context(), evaluation_mode(model):
            scalars = self.measure(model, self._block, eot)
        write_scalars(trainer, scalars)


SUBLAYERS = ("attn", "ffn")


@torch.no_grad()
def residual_ratios(
    model: nn.Module, tokens: Int[Tensor, "B T"], documents: Int[Tensor, "B T"] | None = None
) -> dict[str, Tensor]:
    """Return RMS(y) / RMS(x) of every x + y in the blocks of `model`, as scalar tensors keyed 'layer0/attn/ratio'.

    y is the output of attention or of the feed-forward network, after its Post-Norm if there is one, and x is the
    residual stream before the addition. 'mean/attn/ratio' is the geometric mean over layers.

    Args:
        model: a module that contains the blocks of a `Backbone`
        tokens: (B, T) token ids
        documents: (B, T) document numbers, see `Backbone.forward`
    """
    ratios: dict[str, Tensor] = {}
    stream = torch.empty(0)

    def enter(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        nonlocal stream
        stream = inputs[0].float()

    def add(name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            nonlocal stream
            y = output.float()
            ratios[name] = (y.square().mean() / stream.square().mean()).sqrt()
            stream = stream + y

        return hook

    with ExitStack() as hooks:
        for i, block in enumerate(_blocks(model)):
            hooks.enter_context(block.register_forward_pre_hook(enter))
            for sublayer in SUBLAYERS:
                norm = getattr(block, f"{sublayer}_post_norm")
                hooks.enter_context(norm.register_forward_hook(add(f"layer{i}/{sublayer}/ratio")))
        model(tokens, *(() if documents is None else (documents,)))
    means = {f"mean/{s}/ratio": [r.log() for name, r in ratios.items() if f"/{s}/" in name] for s in SUBLAYERS}
    return ratios | {name: torch.stack(logs).mean().exp() for name, logs in means.items()}


def _blocks(model: nn.Module) -> list[Block]:
    return [module for module in model.modules() if isinstance(module, Block)]


class ResidualMonitor(HeldOutProbe):
    """Log `residual_ratios` of held-out text under residual/.

    Args:
        points: number of measurements in a run, evenly spaced, the last at its end
        sequences: number of held-out sequences per measurement, spread evenly over the validation split
        model: dotted name of the submodule with the blocks; null for our backbone, or the module itself

    Raises:
        ConfigError: a value below 1, or a model without blocks of a `Backbone`
    """

    def __init__(self, points: int = 24, sequences: int = 32, model: str | None = None):
        super().__init__(points, sequences, model)

    def charts(self) -> Pages:
        """Return one page with the means over layers."""
        tags = [f"residual/mean/{sublayer}/ratio" for sublayer in SUBLAYERS]
        return {"residual stream": {"RMS of output / RMS of residual": ["Multiline", tags]}}

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Check that the model has blocks."""
        if not _blocks(model := model_of(pl_module, self.model)):
            raise ConfigError(f"the model of {self.name} is {type(model).__name__}; expected a Backbone.")

    def measure(self, model: nn.Module, block: Int[Tensor, "B S"], eot: int | None) -> dict[str, float]:
        """Return `residual_ratios`."""
        tokens = block[:, :-1]
        ratios = residual_ratios(model, tokens, None if eot is None else document_ids(tokens, eot))
        return {f"residual/{key}": value.item() for key, value in ratios.items()}
