"""Copying from the context: held-out loss per kind of token, and on repeated text (arXiv:2209.11895)."""

import time
from contextlib import nullcontext
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn

from lightning_sv.callbacks.run_state import data_of, known_steps, model_of, settings_of
from lightning_sv.callbacks.step_trigger import StepTrigger
from lightning_sv.callbacks.tensorboard_layout import Pages
from lightning_sv.callbacks.training_monitor import pause_throughput, write_scalars
from lightning_sv.errors import ConfigError
from lightning_sv.nn import document_ids
from lightning_sv.scale.shapes import Bool, Float, Int

#: Tokens per forward pass; the float32 logits of a pass are kept in memory.
TOKENS_PER_PASS = 16_384


class TokenKinds(NamedTuple):
    """Kinds of target tokens, by their context; each token has exactly one kind.

    Attributes:
        repeat: (B, T), True if the pair (previous token, this token) occurred earlier in the sequence
        seen: (B, T), True if the token occurred earlier, but not after the same previous token
        unseen: (B, T), True if the token did not occur earlier
    """

    repeat: Bool[Tensor, "B T"]
    seen: Bool[Tensor, "B T"]
    unseen: Bool[Tensor, "B T"]


def token_kinds(block: Int[Tensor, "B S"]) -> TokenKinds:
    """Classify the targets `block[:, 1:]` by the preceding tokens of their sequence.

    Args:
        block: (B, T + 1) token ids

    >>> kinds = token_kinds(torch.tensor([[5, 6, 7, 5, 6, 5]]))
    >>> kinds.repeat.int().tolist(), kinds.seen.int().tolist()
    ([[0, 0, 0, 1, 0]], [[0, 0, 1, 0, 1]])
    """
    previous, targets = block[:, :-1], block[:, 1:]
    same = targets.unsqueeze(-1) == targets.unsqueeze(-2)  # B T T
    same_pair = same & (previous.unsqueeze(-1) == previous.unsqueeze(-2))
    repeat = same_pair.tril(-1).any(-1)
    seen = same.tril(-1).any(-1) | (targets == block[:, :1])  # the first token is not a target
    return TokenKinds(repeat, seen & ~repeat, ~seen)


@torch.no_grad()
def token_losses(model: nn.Module, block: Int[Tensor, "B S"], eot: int | None = None) -> Float[Tensor, "B T"]:
    """Return -log p(block[:, 1:] | context), in nats.

    Args:
        model: a module that maps (B, T) token ids to (B, T, V) logits
        block: (B, T + 1) token ids
        eot: id of the end-of-text token if attention is restricted to a document
    """
    losses = []
    for part in block.split(max(1, TOKENS_PER_PASS // block.shape[1])):
        tokens, targets = part[:, :-1], part[:, 1:]
        documents = () if eot is None else (document_ids(tokens, eot),)
        log_p = model(tokens, *documents).float().log_softmax(-1)
        losses.append(-log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1))
    return torch.cat(losses)


def copying_losses(
    model: nn.Module, block: Int[Tensor, "B S"], repeat_length: int, eot: int | None = None
) -> dict[str, float]:
    """Split the mean next-token loss by `token_kinds`, and measure it on repeated text.

    repeat, seen, unseen: mean loss of the tokens of a kind, in nats per token (omitted if there are none).
    repeat_share, seen_share: fraction of the tokens of a kind; loss = sum over kinds of fraction times mean.
    first_copy, second_copy: mean loss of the same targets in a sequence that contains a text of `repeat_length` tokens
    twice. second_minus_first: near 0 for a model of token pairs, about minus first_copy for a model that copies.

    Args:
        model: a module that maps (B, T) token ids to (B, T, V) logits
        block: (B, T + 1) token ids
        repeat_length: length of the repeated text in tokens, at most (T + 1) / 2
        eot: id of the end-of-text token if attention is restricted to a document
    """
    losses, kinds = token_losses(model, block, eot), token_kinds(block)
    means = {}
    for name, kind in kinds._asdict().items():
        share = kind.float().mean().item()
        if name != "unseen":
            means[f"{name}_share"] = share
        if share > 0:
            means[name] = losses[kind].mean().item()
    text = block[:, :repeat_length]
    repeated = token_losses(model, torch.cat([text, text], 1), eot)  # B, 2 * repeat_length - 1
    means["first_copy"] = repeated[:, : repeat_length - 1].mean().item()
    means["second_copy"] = repeated[:, repeat_length:].mean().item()
    return means | {"second_minus_first": means["second_copy"] - means["first_copy"]}


class CopyingMonitor(L.Callback):
    """Log copying/{repeat, seen, unseen, second_minus_first, ...} of held-out text, see `copying_losses`.

    A model predicts a repeated pair far better once it has formed an induction circuit, which looks up the token after
    an earlier occurrence (arXiv:2209.11895). The curves show when that happens. Every measurement uses the same
    sequences, samples no random numbers, and does not change weights or gradients.

    Args:
        points: number of measurements in a run, evenly spaced, the last at its end
        sequences: number of held-out sequences per measurement, spread evenly over the validation split
        repeat_length: length of the repeated text in tokens; null for half of data.seq_len
        model: dotted name of the submodule that maps token ids to logits; null for our backbone, or the module itself

    Raises:
        ConfigError: a value below 1 (repeat_length: below 2), or a repeat_length above half of data.seq_len
    """

    def __init__(
        self, points: int = 24, sequences: int = 128, repeat_length: int | None = None, model: str | None = None
    ):
        for key, value, least in (
            ("points", points, 1),
            ("sequences", sequences, 1),
            ("repeat_length", repeat_length, 2),
        ):
            if value is not None and value < least:
                raise ConfigError(f"{key} of CopyingMonitor is {value}; expected at least {least}.")
        self.points, self.sequences, self.repeat_length, self.model = points, sequences, repeat_length, model
        self._clock = StepTrigger("CopyingMonitor")
        self._block: Tensor | None = None

    def charts(self) -> Pages:
        """Return one page: the loss per kind of token, and on repeated text."""
        kinds, copies = TokenKinds._fields, ("first_copy", "second_copy")
        return {
            "copying": {
                "loss by kind of token": ["Multiline", [f"copying/{kind}" for kind in kinds]],
                "text read twice": ["Multiline", [f"copying/{copy}" for copy in copies]],
                "second copy minus first": ["Multiline", ["copying/second_minus_first"]],
            }
        }

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Check before training that the data are token batches and that the repeated text fits into a sequence."""
        if stage != "fit":
            return
        data = data_of(trainer)
        if data is None:
            raise ConfigError(f"datamodule is {trainer.datamodule!r}; expected a TokenDataModule for CopyingMonitor.")  # type: ignore[attr-defined]
        length = self.repeat_length or 2
        if data.seq_len < 2 * length - 1:
            raise ConfigError(
                f"data.seq_len is {data.seq_len}; expected at least {2 * length - 1} for a repeat_length of {length} "
                "tokens in CopyingMonitor."
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Read the sequences."""
        self._clock.start(trainer)
        self._clock.every = max(1, known_steps(trainer, "CopyingMonitor") // self.points)
        data = data_of(trainer)
        assert data is not None
        self._block = data.held_out(self.sequences).to(pl_module.device)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure when due, on every device, because a sharded model needs all of them."""
        if not self._clock.ended(trainer) or not self._clock.is_due(trainer.global_step):
            return
        data, settings = data_of(trainer), settings_of(pl_module)
        assert self._block is not None and data is not None
        start = time.perf_counter()
        eot = data.eot if settings is not None and settings.mask_documents else None
        length = self.repeat_length or (data.seq_len + 1) // 2
        model = model_of(pl_module, self.model)
        was_training = model.training
        model.eval()
        # Compiling for other shapes would take long, and might recompile the training step.
        compiled = settings is not None and settings.compile != "none"
        with (
            torch.compiler.set_stance("force_eager") if compiled else nullcontext(),
            trainer.precision_plugin.forward_context(),
        ):
            losses = copying_losses(model, self._block, length, eot)
        model.train(was_training)
        write_scalars(trainer, {f"copying/{key}": value for key, value in losses.items()})
        pause_throughput(trainer, time.perf_counter() - start)
