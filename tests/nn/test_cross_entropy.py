"""The loss without logits against the plain one: values, all gradients, second derivatives; in
every dtype."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_sv.plan.allocated_bytes import AllocatedBytes
from lightning_sv.scale.fast import cross_entropy, linear_cross_entropy
from lightning_sv.scale.fast.eager import CHUNK_ELEMENTS
from lightning_sv.scale.fast.gram import inverse_rms_of_product

TOKENS = 45
D = 12
VOCAB = 50
EPS = 1e-3
ROAD = {"in chunks": 10**9, "by the Gram matrix": 0}  # GRAM_FROM


def ours(
    x: Tensor, weight: Tensor, *gammas: Tensor, targets: Tensor, norm_eps: float | None
) -> Tensor:
    return linear_cross_entropy(x, weight, targets, *gammas, norm_eps=norm_eps)


def definition(*inputs: Tensor, targets: Tensor, norm_eps: float | None) -> Tensor:
    return cross_entropy.loss_of_logits(inputs, targets, norm_eps)


def oracle(
    x: Tensor,
    weight: Tensor,
    gamma_in: Tensor,
    gamma_out: Tensor,
    targets: Tensor,
    norm_eps: float | None,
) -> Tensor:
    """The definition, of torch's elementary operations alone."""
    logits = (x * gamma_in) @ weight.T
    if norm_eps is not None:
        logits = logits / (logits.square().mean(-1, keepdim=True) + norm_eps).sqrt()
    log_p = (gamma_out * logits).log_softmax(-1)
    return -log_p.gather(-1, targets.unsqueeze(-1)).mean()


@pytest.mark.parametrize("road", ROAD)
@pytest.mark.parametrize("eps", [None, EPS], ids=["plain", "normalized"])
def test_linear_cross_entropy_and_derivatives_equal_definition(
    eps: float | None, road: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "GRAM_FROM", ROAD[road])
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", 2 * VOCAB)  # 16 of 45 tokens per chunk
    made = [
        torch.randn(3, 15, D),
        torch.randn(VOCAB, D),
        1 + 0.3 * torch.randn(D),
        1 + 0.3 * torch.randn(VOCAB),
    ]
    leaves = [t.double().requires_grad_() for t in made]
    targets = torch.randint(0, VOCAB, (3, 15))
    found, exact = (loss(*leaves, targets=targets, norm_eps=eps) for loss in (ours, oracle))
    torch.testing.assert_close(found, exact, rtol=1e-12, atol=0)
    first = torch.autograd.grad(
        3 * found, leaves, retain_graph=True
    )  # a loss is scaled if micro-batches add up
    plain = torch.autograd.grad(3 * exact, leaves, retain_graph=True)
    torch.testing.assert_close(first, plain, rtol=1e-12, atol=1e-14)
    direction = [torch.randn_like(leaf) for leaf in leaves]
    seconds = []
    for loss in (found, exact):
        gradient = torch.autograd.grad(loss, leaves, create_graph=True)
        seconds.append(torch.autograd.grad(gradient, leaves, direction))
    torch.testing.assert_close(*seconds, rtol=1e-11, atol=1e-13)
    with torch.no_grad():
        assert torch.equal(ours(*leaves, targets=targets, norm_eps=eps), found)


@pytest.mark.parametrize("road", ROAD)
def test_linear_cross_entropy_in_bf16_is_as_accurate_as_plain(
    road: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "GRAM_FROM", ROAD[road])
    wide = [
        torch.randn(512, 32),
        torch.randn(256, 32),
        1 + 0.3 * torch.randn(32),
        1 + 0.3 * torch.randn(256),
    ]
    wide = [t.double().requires_grad_() for t in wide]
    targets = torch.randint(0, 256, (512,))
    exact = torch.autograd.grad(oracle(*wide, targets=targets, norm_eps=EPS), wide)
    narrow = [t.detach().float().requires_grad_() for t in wide]
    errors = []
    with_graph = []
    for loss in (ours, definition):
        with torch.autocast("cpu", torch.bfloat16):
            nats = loss(*narrow, targets=targets, norm_eps=EPS)
        assert nats.dtype == torch.float32
        found = torch.autograd.grad(nats, narrow, retain_graph=True)
        assert not any(torch.equal(gradient, gradient.bfloat16().float()) for gradient in found[2:])
        with_graph.append(torch.autograd.grad(nats, narrow, create_graph=True))
        errors.append([float((f - e).norm() / e.norm()) for f, e in zip(found, exact, strict=True)])
    # Errors of rounding scatter from draw to draw; gamma_in's gradient by the Gram matrix: see
    # scale/fast/gram.py.
    room = [1.5, 1.5, 5 if road == "by the Gram matrix" else 1.5, 1.5]
    for error, plain, factor in zip(*errors, room, strict=True):
        assert error < factor * plain
        assert plain < min(0.01, 10 * error)  # both products are in bf16
    if road == "in chunks":
        torch.testing.assert_close(*with_graph, rtol=1e-5, atol=1e-7)


def test_inverse_rms_of_product_is_finite_if_rounding_makes_squares_negative() -> None:
    """In bf16, with a direction of W 300 times as long as the others."""
    direction = F.normalize(torch.randn(64), dim=0)
    weight = (torch.randn(512, 64) + 300 * direction).requires_grad_()
    x = torch.randn(2048, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        r = inverse_rms_of_product(x, weight, None, EPS)
        with torch.no_grad():
            by_definition = inverse_rms_of_product(x, weight, None, EPS)
    is_clamped = by_definition.detach() > 0.99 * EPS**-0.5
    assert is_clamped.any() and torch.equal(r, by_definition)

    grad_x, grad_weight = torch.autograd.grad(r.sum(), (x, weight))
    assert r.isfinite().all() and grad_x.isfinite().all() and grad_weight.isfinite().all()
    assert torch.equal(grad_x[is_clamped.squeeze(-1)], torch.zeros(int(is_clamped.sum()), 64))


def test_linear_cross_entropy_never_holds_all_logits() -> None:
    x = torch.randn(4096, 16, requires_grad=True)
    weight = torch.randn(2048, 16, requires_grad=True)
    targets = torch.randint(0, 2048, (4096,))
    with AllocatedBytes() as plain:
        F.cross_entropy(x @ weight.T, targets).backward()
    with AllocatedBytes() as chunked:
        linear_cross_entropy(x, weight, targets, norm_eps=1e-5).backward()
    assert chunked.peak < 4 * 4096 * 2048 / 2 < plain.peak
