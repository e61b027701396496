"""Measurements on held-out text: losses by kind of token, RMS of sublayers over the residual
stream."""

import itertools
import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from lightning_sv import Backbone, BackboneConfig
from lightning_sv.callbacks import ResidualMonitor, residual_ratios
from lightning_sv.callbacks.copying import copying_losses, token_kinds, token_losses
from lightning_sv.errors import ConfigError
from lightning_sv.nn import document_ids
from lightning_sv.nn.rope import rope_tables
from lightning_sv.plan.allocated_bytes import AllocatedBytes

V = 64
Bigram = partial(nn.Embedding, V, V)  # predicts from the present token alone


class Induction(nn.Module):
    """Predicts what followed the latest earlier occurrence of the present token, and any token if
    there is none."""

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        b, t = tokens.shape
        earlier = (tokens.unsqueeze(-1) == tokens.unsqueeze(-2)).tril(-1)  # b t t
        if documents is not None:
            earlier &= documents.unsqueeze(-1) == documents.unsqueeze(-2)
        latest = torch.where(earlier, torch.arange(t), -1).amax(-1)
        follower = tokens.gather(-1, (latest + 1).clamp(max=t - 1))
        logits = torch.zeros(b, t, V)
        return logits.scatter(
            -1, follower.unsqueeze(-1), torch.where(latest >= 0, 20.0, 0.0).unsqueeze(-1)
        )


@pytest.mark.parametrize("masked", [False, True])
def test_token_kinds_random_text_match_brute_force(masked: bool) -> None:
    block = torch.randint(0, 7, (16, 20))
    documents = document_ids(block, eot=0)
    kinds = token_kinds(block, documents if masked else None)
    rows = zip(block.tolist(), documents.tolist(), zip(*kinds.values(), strict=True), strict=True)
    for row, numbers, (repeat, seen, unseen) in rows:
        for j in range(1, len(row)):
            start = numbers.index(numbers[j - 1]) if masked else 0
            pairs = set(itertools.pairwise(row[start:j]))
            kind = (row[j - 1], row[j]) in pairs, row[j] in row[start:j]
            assert bool(repeat[j - 1]) == kind[0]
            assert bool(seen[j - 1]) == (kind[1] and not kind[0])
            assert bool(unseen[j - 1]) == (not kind[1])


def test_token_kinds_memory_is_linear_in_the_length() -> None:
    block = torch.randint(0, 50_000, (1, 4_097))
    with AllocatedBytes() as counter:
        token_kinds(block)
    assert counter.peak < 100 * block.numel()


def test_copying_losses_induction_is_near_zero_on_repeats() -> None:
    # each token once, so its follower is unambiguous
    text = torch.stack([torch.randperm(V)[:24] for _ in range(8)])
    block = torch.cat([text, text[:, :9]], 1)
    copies, counts = (copying_losses(model, block, 16) for model in (Induction(), Bigram()))
    assert copies["repeat"] < 1e-3 and copies["second_copy"] < 0.3 * copies["first_copy"]
    assert copies["unseen"] == pytest.approx(math.log(V), abs=1e-4)
    assert counts["repeat"] > 3
    assert counts["second_minus_first"] == pytest.approx(0, abs=1e-5)
    with pytest.raises(ConfigError, match="repeat_length is 17"):
        copying_losses(Bigram(), block, 17)


def test_copying_losses_of_masked_documents_copy_within_their_document() -> None:
    text = torch.stack([1 + torch.randperm(V - 1)[:16] for _ in range(8)])
    text[:, 7] = 0
    block = torch.cat([text, text], 1)
    losses = copying_losses(Induction(), block, 16, document_ids(block, eot=0))
    assert losses["second_copy"] < 0.3 * losses["first_copy"]
    assert losses["repeat_share"] == 0  # the second reading is a document of its own


def test_copying_losses_kinds_sum_to_the_mean_loss() -> None:
    model = Bigram()
    block = torch.randint(0, 12, (8, 33))
    losses = copying_losses(model, block, 8)
    shares = {"repeat": losses["repeat_share"], "seen": losses["seen_share"]}
    shares["unseen"] = 1 - sum(shares.values())
    logits = model(block[:, :-1]).flatten(0, 1)
    expected = nn.functional.cross_entropy(logits, block[:, 1:].flatten()).item()
    mean = sum(share * losses[kind] for kind, share in shares.items())
    assert mean == pytest.approx(expected, rel=1e-5)
    assert token_losses(model, block).mean().item() == pytest.approx(expected, rel=1e-5)


def rms(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()


@pytest.mark.parametrize("post_norm", [False, True])
def test_residual_ratios_equal_the_written_out_sums(
    post_norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two passes."""
    monkeypatch.setattr("lightning_sv.callbacks.held_out_probe.TOKENS_PER_PASS", 8)
    config = BackboneConfig(d_model=32, n_layer=2, n_head=2, vocab_size=64, post_norm=post_norm)
    net = Backbone(config, "hg+or")
    tokens = torch.randint(0, 64, (2, 8))
    expected = {}
    with torch.no_grad():
        x = net.embed(tokens)
        rope = rope_tables(8, config.head_width, config.rope_theta, x, config.rope_scaling)
        for i, block in enumerate(net.layers):
            for name in ("attn", "ffn"):
                y = block.attn(x, rope, None) if name == "attn" else block.ffn(x)[0]
                y = getattr(block, f"{name}_post_norm")(y)
                expected[f"layer{i}/{name}/ratio"] = rms(y) / rms(x)
                x = x + y
    for name in ("attn", "ffn"):  # geometric means
        product = expected[f"layer0/{name}/ratio"] * expected[f"layer1/{name}/ratio"]
        expected[f"mean/{name}/ratio"] = product**0.5
    found = {key: value.item() for key, value in residual_ratios(net, tokens).items()}
    assert found == pytest.approx(expected)


def test_residual_monitor_restricts_attention_to_a_document() -> None:
    net = Backbone(BackboneConfig(d_model=32, n_layer=2, n_head=2, vocab_size=64), "hg+or")
    block = torch.randint(0, 64, (2, 9))
    block[:, 4] = 0
    tokens = block[:, :-1]
    expected = residual_ratios(net, tokens, document_ids(tokens, eot=0))
    assert ResidualMonitor().measure(net, block, document_ids(block, eot=0)) == expected
    assert ResidualMonitor().measure(net, block, None) != expected
