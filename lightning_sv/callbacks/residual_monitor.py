"""Size of the sublayers' outputs in comparison with the residual stream (paper, Section 2.2)."""

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_sv.callbacks.held_out_probe import HeldOutProbe
from lightning_sv.callbacks.run_state import model_of
from lightning_sv.callbacks.tensorboard_layout import Pages
from lightning_sv.errors import ConfigError
from lightning_sv.nn import document_ids
from lightning_sv.nn.backbone import Block
from lightning_sv.scale.shapes import Int
from lightning_sv.settings.data import DataConfig

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
    handles = []

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

    for i, block in enumerate(_blocks(model)):
        handles.append(block.register_forward_pre_hook(enter))
        for sublayer in SUBLAYERS:
            norm = getattr(block, f"{sublayer}_post_norm")
            handles.append(norm.register_forward_hook(add(f"layer{i}/{sublayer}/ratio")))
    try:
        model(tokens, *(() if documents is None else (documents,)))
    finally:
        for handle in handles:
            handle.remove()
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

    def measure(
        self, model: nn.Module, block: Int[Tensor, "B S"], data: DataConfig, eot: int | None
    ) -> dict[str, float]:
        """Return `residual_ratios`."""
        tokens = block[:, :-1]
        ratios = residual_ratios(model, tokens, None if eot is None else document_ids(tokens, eot))
        return {f"residual/{key}": value.item() for key, value in ratios.items()}
