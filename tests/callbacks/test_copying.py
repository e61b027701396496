"""The loss by kind of token against brute force, hand-made models of both kinds, and a run."""

import itertools

import pytest
import torch
from torch import Tensor, nn

from lightning_sv.callbacks.copying import copying_losses, token_kinds, token_losses

V = 64


class Induction(nn.Module):
    """Predicts what followed the latest earlier occurrence of the present token, and any token if there is none."""

    def forward(self, tokens: Tensor) -> Tensor:
        b, t = tokens.shape
        earlier = (tokens.unsqueeze(-1) == tokens.unsqueeze(-2)).tril(-1)  # b t t
        latest = torch.where(earlier, torch.arange(t), -1).amax(-1)
        follower = tokens.gather(-1, (latest + 1).clamp(max=t - 1))
        logits = torch.zeros(b, t, V)
        return logits.scatter(-1, follower.unsqueeze(-1), torch.where(latest >= 0, 20.0, 0.0).unsqueeze(-1))


class Bigram(nn.Module):
    """Predicts from the present token alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(V, V)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)


def test_token_kinds_random_text_match_brute_force() -> None:
    block = torch.randint(0, 7, (16, 20))
    kinds = token_kinds(block)
    for row, (repeat, seen, unseen) in zip(block.tolist(), zip(*kinds.values(), strict=True), strict=True):
        for j in range(1, len(row)):
            pairs = set(itertools.pairwise(row[:j]))
            kind = (row[j - 1], row[j]) in pairs, row[j] in row[:j]
            assert bool(repeat[j - 1]) == kind[0]
            assert bool(seen[j - 1]) == (kind[1] and not kind[0])
            assert bool(unseen[j - 1]) == (not kind[1])


def test_copying_losses_induction_is_near_zero_on_repeats() -> None:
    text = torch.stack([torch.randperm(V)[:24] for _ in range(8)])  # each token once, so its follower is unambiguous
    block = torch.cat([text, text[:, :9]], 1)
    copies, counts = (copying_losses(model, block, 16) for model in (Induction(), Bigram()))
    assert copies["repeat"] < 1e-3 and copies["second_copy"] < 0.3 * copies["first_copy"]
    assert copies["unseen"] == pytest.approx(torch.tensor(V).log().item(), abs=1e-4)
    assert counts["repeat"] > 3
    assert counts["second_minus_first"] == pytest.approx(0, abs=1e-5)


def test_copying_losses_kinds_sum_to_the_mean_loss() -> None:
    model, block = Bigram(), torch.randint(0, 12, (8, 33))
    losses = copying_losses(model, block, 8)
    shares = {"repeat": losses["repeat_share"], "seen": losses["seen_share"]}
    shares["unseen"] = 1 - sum(shares.values())
    expected = nn.functional.cross_entropy(model(block[:, :-1]).flatten(0, 1), block[:, 1:].flatten())
    assert sum(share * losses[kind] for kind, share in shares.items()) == pytest.approx(expected.item(), rel=1e-5)
    assert token_losses(model, block).mean().item() == pytest.approx(expected.item(), rel=1e-5)
