"""Copying from the context: held-out loss per kind of token, and on repeated text.

Source: arXiv:2209.11895.
"""

import lightning as L
import torch
from torch import Tensor, nn

from lightning_sv.callbacks.held_out_probe import HeldOutProbe, passes
from lightning_sv.callbacks.run_state import data_of
from lightning_sv.errors import ConfigError, expect
from lightning_sv.runs.tags import COPYING
from lightning_sv.scale.shapes import Bool, Float, Int


def token_kinds(
    block: Int[Tensor, "B S"], documents: Int[Tensor, "B S"] | None = None
) -> dict[str, Bool[Tensor, "B T"]]:
    """Classify the targets `block[:, 1:]` by their context; each has exactly one kind.

    repeat: the pair (previous token, this token) occurred earlier in the context; seen: the token
    occurred earlier, but not after the same previous token; unseen: the token did not occur
    earlier. The context is the sequence, or the document of the previous token if `documents`, the
    result of `document_ids`, is given.

    >>> kinds = token_kinds(torch.tensor([[5, 6, 7, 5, 6, 5]]))
    >>> kinds["repeat"].int().tolist(), kinds["seen"].int().tolist()
    ([[0, 0, 0, 1, 0]], [[0, 0, 1, 0, 1]])
    """
    size = block.max() + 1
    # equal tokens of two documents differ
    context = 0 if documents is None else documents[:, :-1] * size
    before = block[:, :-1].long() + context  # B T
    targets = block[:, 1:].long() + context  # B T
    repeat = _occurred(targets * size + block[:, :-1])
    # before_0 target_0 before_1 target_1 ...: a target occurred if it stands anywhere to the left
    alternating = torch.stack([before, targets], -1).flatten(1)  # B 2T
    seen = _occurred(alternating)[:, 1::2]
    return {"repeat": repeat, "seen": seen & ~repeat, "unseen": ~seen}


def _occurred(numbers: Int[Tensor, "B N"]) -> Bool[Tensor, "B N"]:
    """Return True for each number that occurred earlier in its row."""
    ordered, places = numbers.sort(stable=True)
    occurred = torch.zeros_like(numbers, dtype=torch.bool)
    return occurred.scatter(-1, places[:, 1:], ordered[:, 1:] == ordered[:, :-1])


@torch.no_grad()
def token_losses(
    model: nn.Module, block: Int[Tensor, "B S"], documents: Int[Tensor, "B S"] | None = None
) -> Float[Tensor, "B T"]:
    """Return -log p(block[:, 1:] | context), in nats.

    With `documents` attention is restricted to a document.
    """
    losses = []
    for parts in passes(block, documents):
        out = model(*(part[:, :-1] for part in parts))
        logits = getattr(out, "logits", out)  # B T V
        targets = parts[0][:, 1:]  # B T
        log_p = logits.float().log_softmax(-1)
        losses.append(-log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1))
    return torch.cat(losses)


def copying_losses(
    model: nn.Module,
    block: Int[Tensor, "B S"],
    repeat_length: int,
    documents: Int[Tensor, "B S"] | None = None,
) -> dict[str, float]:
    """Split the mean next-token loss by `token_kinds`, and measure it on repeated text.

    repeat, seen, unseen: mean loss of the tokens of a kind, in nats per token (omitted if there are
    none). repeat_share, seen_share: fraction of the tokens of a kind; loss = sum over kinds of
    fraction times mean. first_copy, second_copy: mean loss of the same targets in a sequence that
    contains a text of `repeat_length` tokens twice. second_minus_first: near 0 for a model of token
    pairs, about minus first_copy for a model that copies.

    Args:
        model: a module that maps (B, T) token ids to (B, T, V) logits, or to an object with
            `logits`
        block: (B, T + 1) token ids
        repeat_length: length of the repeated text in tokens, at most (T + 1) / 2
        documents: (B, T + 1) document of each token if attention is restricted to it, the result of
            `document_ids`
    """
    most = block.shape[1] // 2
    expected = f"from 2 to {most}, half of a sequence."
    expect(2 <= repeat_length <= most, "repeat_length", repeat_length, expected)
    text = block[:, :repeat_length]
    documents_of_text = None if documents is None else documents[:, :repeat_length]
    by_kind = _losses_by_kind(model, block, documents)
    return by_kind | _losses_of_copies(model, text, documents_of_text)


def _losses_by_kind(
    model: nn.Module, block: Int[Tensor, "B S"], documents: Int[Tensor, "B S"] | None
) -> dict[str, float]:
    """Return the mean loss of each kind of token, and the shares of `repeat` and `seen`."""
    losses = token_losses(model, block, documents)  # B T
    means = {}
    for name, kind in token_kinds(block, documents).items():
        share = kind.float().mean().item()
        if name != "unseen":
            means[f"{name}_share"] = share
        if share > 0:
            means[name] = losses[kind].mean().item()
    return means


def _losses_of_copies(
    model: nn.Module, text: Int[Tensor, "B L"], documents: Int[Tensor, "B L"] | None
) -> dict[str, float]:
    """Return the mean losses of the first and the second copy in a sequence of a text twice."""
    twice = text.repeat(1, 2)
    # The second copy has the documents of the first one, so that it attends to it.
    documents_twice = None if documents is None else documents.repeat(1, 2)
    losses = token_losses(model, twice, documents_twice)  # B, 2 L - 1

    # Both means leave out the first token of the text, which is not predicted in the first copy.
    length = text.shape[1]
    first_copy = losses[:, : length - 1].mean().item()
    second_copy = losses[:, length:].mean().item()
    return {
        "first_copy": first_copy,
        "second_copy": second_copy,
        "second_minus_first": second_copy - first_copy,
    }


class CopyingMonitor(HeldOutProbe):
    """Log copying/{repeat, seen, unseen, second_minus_first, ...} of held-out text.

    A model predicts a repeated pair far better once it has formed an induction circuit, which looks
    up the token after an earlier occurrence (arXiv:2209.11895). The curves show when that happens.

    Args:
        points: number of measurements in a run, evenly spaced, the last at its end
        sequences: number of held-out sequences per measurement, spread evenly over the validation
            split
        repeat_length: length of the repeated text in tokens; null for half of data.seq_len
        model: dotted name of the submodule that maps token ids to logits; null for our backbone, or
            the module itself

    Raises:
        ConfigError: a value below 1 (repeat_length: below 2), or a repeat_length above half of
            data.seq_len
    """

    tag = COPYING.removesuffix("/")

    def __init__(
        self,
        points: int = 24,
        sequences: int = 128,
        repeat_length: int | None = None,
        model: str | None = None,
    ):
        super().__init__(points, sequences, model)
        if repeat_length is not None:
            self.expect_at_least("repeat_length", repeat_length, 2)
        self.repeat_length = repeat_length

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Check that the repeated text fits into a sequence."""
        super().on_fit_start(trainer, pl_module)
        data = data_of(trainer)
        assert data is not None
        length = self.repeat_length or 2
        least = 2 * length - 1
        if data.seq_len < least:
            expected = f"at least {least} for a repeat_length of {length} tokens in CopyingMonitor."
            raise ConfigError(f"data.seq_len is {data.seq_len}; expected {expected}")

    def measure(
        self, model: nn.Module, block: Int[Tensor, "B S"], documents: Int[Tensor, "B S"] | None
    ) -> dict[str, float]:
        """Return `copying_losses`."""
        repeat_length = self.repeat_length or block.shape[1] // 2
        return copying_losses(model, block, repeat_length, documents)
