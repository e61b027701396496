"""Products against the dense Hessian of a Llama in plain operations."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sv.curvature import DifferenceProduct, HessianProduct, lanczos
from tests.curvature.oracle import CASES, STRATEGY_ROWS, SUBSETS, case, split_like


def flat(vector: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([x.flatten() for x in vector])


@pytest.mark.parametrize("strategy", STRATEGY_ROWS)
def test_products_of_every_subset_equal_dense_hessian(strategy: str) -> None:
    c = case(strategy)
    torch.testing.assert_close(c.loss(), c.plain_value, rtol=1e-12, atol=0)
    for subset in SUBSETS:
        if (strategy, subset) not in CASES:
            assert not c.subset(subset)
            continue
        parameters = c.subset(subset)
        dense = c.dense(parameters)
        v = torch.randn(len(dense), dtype=torch.float64)
        vector = split_like(v, parameters)
        want = dense @ v
        exact = flat(HessianProduct(c.loss, parameters)(vector))
        torch.testing.assert_close(exact, want, rtol=0, atol=1e-11 * want.norm().item())
        difference = flat(DifferenceProduct(c.loss, parameters)(vector))
        assert (difference - want).norm() < 1e-6 * want.norm()


def test_difference_product_in_float32_restores_the_model() -> None:
    c = case("hg+dnp+or")
    model = copy.deepcopy(c.model).float()
    parameters = list(model.parameters())
    parameters[0].grad = torch.ones_like(parameters[0])
    before = [p.detach().clone() for p in parameters]
    v = torch.randn(len(c.hessian))
    with torch.no_grad():  # as in callbacks
        product = DifferenceProduct(lambda: c.loss(model), parameters)
        found, want = flat(product(split_like(v, parameters))), c.hessian @ v.double()
    assert (found - want).norm() < 5e-3 * want.norm()
    assert lanczos(product).value == pytest.approx(torch.linalg.eigvalsh(c.hessian)[-1].item(), rel=2e-3)
    assert not flat(product(tuple(torch.zeros_like(p) for p in parameters))).any()

    def broken() -> Tensor:
        raise RuntimeError("no loss")

    product.loss = broken
    with pytest.raises(RuntimeError, match="no loss"):
        product(split_like(v, parameters))
    assert all(torch.equal(p, b) for p, b in zip(parameters, before, strict=True))
    assert torch.equal(parameters[0].grad, torch.ones_like(parameters[0]))


@pytest.mark.long
def test_hessian_product_of_compiled_model_equals_dense() -> None:
    c = case("hg+dnp+or")
    model = copy.deepcopy(c.model)
    model.compile(backend="aot_eager")
    c.loss(model).backward()  # compiled by now
    parameters = list(model.parameters())
    with pytest.raises(RuntimeError, match="double backward|donated buffers"):
        gradient = torch.autograd.grad(c.loss(model), parameters, create_graph=True)
        torch.autograd.grad(gradient, parameters, gradient)
    v = torch.randn(len(c.hessian), dtype=torch.float64)
    with torch.no_grad():
        found = flat(HessianProduct(lambda: c.loss(model), parameters)(split_like(v, parameters)))
    torch.testing.assert_close(found, c.hessian @ v, rtol=1e-9, atol=1e-10)


def test_hessian_product_of_linear_and_unused_parameters_is_zero() -> None:
    used, linear, unused = (nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(3))
    ones = tuple(torch.ones(2, dtype=torch.float64) for _ in range(3))
    product = HessianProduct(lambda: used.pow(3).sum() + 2 * linear.sum(), [used, linear, unused])
    image = product(ones)
    assert [x.tolist() for x in image] == [[6, 6], [0, 0], [0, 0]]
    assert [x.tolist() for x in HessianProduct(lambda: linear.sum(), [linear])(ones[:1])] == [[0, 0]]
    # the diagonal 6, 6 and zeros
    assert lanczos(product).value == pytest.approx(6)


def test_hessian_product_after_a_step_refused() -> None:
    p = nn.Parameter(torch.ones(3))
    product = HessianProduct(lambda: p.pow(3).sum(), [p])
    with torch.no_grad():
        p.add_(1)
    with pytest.raises(ValueError, match="HessianProduct was built"):
        product([torch.ones(3)])


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> Tensor:
        return 2 * grad * ctx.saved_tensors[0]


def test_products_of_wrong_input_refused() -> None:
    p = nn.Parameter(torch.ones(3))
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    for make, message in (
        (lambda: HessianProduct(lambda: p.sum(), []), "empty"),
        (lambda: HessianProduct(lambda: p.sum(), [p, p]), "duplicate"),
        (lambda: HessianProduct(lambda: p.sum(), [p, frozen]), r"parameters \[1\]"),
        (lambda: HessianProduct(lambda: p * p, [p]), r"shape \(3,\)"),
        (lambda: HessianProduct(lambda: p.detach().sum(), [p]), "no gradient"),
        (lambda: HessianProduct(lambda: _Once.apply(p).square().sum(), [p]), "use DifferenceProduct"),
        (lambda: DifferenceProduct(lambda: p.sum(), [p], step=0.0), "step of DifferenceProduct is 0.0"),
        (lambda: HessianProduct(lambda: p.square().sum(), [p])([]), r"vector is \[\];"),
        (lambda: HessianProduct(lambda: p.square().sum(), [p])([torch.ones(1)]), r"vector is \[\(1,\)\];"),
        (lambda: DifferenceProduct(lambda: p.square().sum(), [p])([torch.ones(1)]), r"vector is \[\(1,\)\];"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    (image,) = DifferenceProduct(lambda: _Once.apply(p).square().sum(), [p])([torch.ones(3)])
    torch.testing.assert_close(image, torch.full((3,), 12.0), rtol=1e-3, atol=0)


def test_difference_product_with_dropout_uses_one_mask() -> None:
    """Different masks on both sides would add a false curvature."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 1)).double()
    x, y = torch.randn(20, 5, dtype=torch.float64), torch.randn(20, 1, dtype=torch.float64)
    parameters = list(net.parameters())
    vector = [torch.randn_like(p) for p in parameters]

    def loss() -> Tensor:
        return F.mse_loss(net(x), y)

    state = torch.get_rng_state()
    differences = DifferenceProduct(loss, parameters)
    for _ in range(2):
        found = differences(vector)
        assert torch.equal(torch.get_rng_state(), state)
    exact = HessianProduct(loss, parameters)(vector)  # built in the same random state: the same masks
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-7)
