"""Size of what each sublayer adds to the residual stream, on held-out text."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_sv.callbacks.branches import means_over_layers
from lightning_sv.callbacks.held_out_probe import HeldOutProbe, passes
from lightning_sv.callbacks.run_state import model_of
from lightning_sv.errors import ConfigError
from lightning_sv.nn.backbone import Block
from lightning_sv.scale.shapes import Int

SUBLAYERS = ("attn", "ffn")


class ResidualSizes:
    """Hooks that follow the residual stream x through a block: x + attn(x), then + ffn(x).

    A block has two additions. The stream before the first is the block's input; each hook on the
    output y of a sublayer adds up the squares of y and x, and moves x on to x + y.
    """

    def __init__(self) -> None:
        self._squares: dict[str, Tensor] = {}  # of y and of x
        self._stream = torch.empty(0)  # B T D

    def enter_block(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Forward pre-hook of a block."""
        self._stream = inputs[0].float()

    def after_sublayer(self, name: str) -> Callable[..., None]:
        """Return the forward hook of the last module of a sublayer, its Post-Norm."""

        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            y = output.float()
            squares = torch.stack([y.square().sum(), self._stream.square().sum()])
            self._squares[name] = self._squares.get(name, 0) + squares
            self._stream = self._stream + y

        return hook

    def ratios(self) -> dict[str, Tensor]:
        """Return RMS(y) / RMS(x) of each sublayer over all passes."""
        return {name: (y / x).sqrt() for name, (y, x) in self._squares.items()}


@torch.no_grad()
def residual_ratios(
    model: nn.Module, tokens: Int[Tensor, "B T"], documents: Int[Tensor, "B T"] | None = None
) -> dict[str, Tensor]:
    """Return RMS(y) / RMS(x) of every x + y in the blocks of `model`, keyed 'layer0/attn/ratio'.

    y is the output of attention or of the feed-forward network, after its Post-Norm if there is
    one, and x is the residual stream before the addition. 'mean/attn/ratio' is the geometric mean
    over layers.

    Args:
        model: a module that contains the blocks of a `Backbone`
        tokens: (B, T) token ids
        documents: (B, T) document numbers, see `Backbone.forward`

    Raises:
        ConfigError: there are no such blocks
    """
    blocks = _blocks(model)
    if not blocks:
        raise ConfigError(
            f"model is a {type(model).__name__}; expected one with blocks of a Backbone."
        )
    sizes = ResidualSizes()
    with ExitStack() as hooks:
        for i, block in enumerate(blocks):
            hooks.enter_context(block.register_forward_pre_hook(sizes.enter_block))
            for sublayer in SUBLAYERS:
                norm = getattr(block, f"{sublayer}_post_norm")
                hook = sizes.after_sublayer(f"layer{i}/{sublayer}/ratio")
                hooks.enter_context(norm.register_forward_hook(hook))
        for parts in passes(tokens, documents):
            model(*parts)
    ratios = sizes.ratios()
    return ratios | _geometric_means(ratios)


def _geometric_means(ratios: dict[str, Tensor]) -> dict[str, Tensor]:
    logs = {name: ratio.log() for name, ratio in ratios.items()}
    return {name: mean.exp() for name, mean in means_over_layers(logs).items()}


def _blocks(model: nn.Module) -> list[Block]:
    return [module for module in model.modules() if isinstance(module, Block)]


class ResidualMonitor(HeldOutProbe):
    """Log `residual_ratios` of held-out text under residual/.

    Args:
        points: number of measurements in a run, evenly spaced, the last at its end
        sequences: number of held-out sequences per measurement, spread evenly over the validation
            split
        model: dotted name of the submodule that maps token ids to logits; null for our backbone, or
            the module itself

    Raises:
        ConfigError: a value below 1, or a model without blocks of a `Backbone`
    """

    tag = "residual"

    def __init__(self, points: int = 24, sequences: int = 32, model: str | None = None):
        super().__init__(points, sequences, model)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Check that the data are token batches, and that the model has blocks."""
        super().on_fit_start(trainer, pl_module)
        model = model_of(pl_module, self.model)
        if not _blocks(model):
            found = type(model).__name__
            raise ConfigError(f"the model of {self.name} is {found}; expected a Backbone.")

    def measure(
        self, model: nn.Module, block: Int[Tensor, "B S"], documents: Int[Tensor, "B S"] | None
    ) -> dict[str, Tensor]:
        """Return `residual_ratios`."""
        if documents is not None:
            documents = documents[:, :-1]
        return residual_ratios(model, block[:, :-1], documents)
