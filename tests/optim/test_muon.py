"""Muon against Moonlight's formula written out, and its parts: shards, stacks, settings."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR
from torch.testing._internal.distributed.fake_pg import FakeStore

import lightning_sv.optim.muon as muon
from lightning_sv.optim import OptimConfig, build_optimizer, role_groups
from lightning_sv.optim.muon import Muon, orthogonalize
from lightning_sv.scale import ScaledLinear
from lightning_sv.scale.vector import OriginalSpaceScale

LR = 0.02
STEPS = 6


class Experts(nn.Module):
    """Every kind of parameter: 2-D and 3-D, wide and tall, router, embedding, head, scale
    vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = ScaledLinear(40, 24)
        self.tall = ScaledLinear(24, 40)
        self.up = ScaledLinear(
            24, 40, batch_dims=(5,), scale_in=OriginalSpaceScale(24, "input", batch_dims=(5,))
        )
        self.down = ScaledLinear(
            40, 24, batch_dims=(5,), scale_out=OriginalSpaceScale(24, "output", batch_dims=(5,))
        )
        self.router = ScaledLinear(24, 5, role="router")
        self.embed = nn.Embedding(48, 24)
        self.head = ScaledLinear(24, 48, role="head")
        for parameter in self.parameters():
            nn.init.normal_(parameter, mean=0.1)


def draw(model: nn.Module, number: int) -> dict[str, Tensor]:
    """Gradients that depend on the step and the parameter's place alone."""
    generator = torch.Generator().manual_seed(number)
    return {
        name: torch.randn(p.shape, generator=generator).to(p)
        for name, p in model.named_parameters()
    }


def train(model: nn.Module, step: Callable[[], object]) -> None:
    for number in range(STEPS):
        for name, gradient in draw(model, number).items():
            model.get_parameter(name).grad = gradient
        step()


def build(model: nn.Module, **kwargs) -> Optimizer:
    return build_optimizer(
        role_groups(model, frozenset({"input"})), OptimConfig("muon", **kwargs), LR
    )


def moonlight(weight: Tensor, gradients: list[Tensor]) -> Tensor:
    """arXiv:2502.16982, eq. 1 and 4, with Nesterov momentum, in plain float64."""
    weight = weight.double()
    momentum = torch.zeros_like(weight)
    for gradient in gradients:
        momentum = 0.95 * momentum + gradient.double()
        x = gradient.double() + 0.95 * momentum
        x = x / x.square().sum().sqrt()
        for _ in range(5):
            x = 3.4445 * x - 4.7750 * x @ x.T @ x + 2.0315 * x @ x.T @ x @ x.T @ x
        weight = weight - LR * (0.2 * math.sqrt(max(weight.shape)) * x + 0.1 * weight)
    return weight


def as_matrices(weight: Tensor) -> Tensor:
    """Return (experts, m, n), with one expert for a matrix."""
    return weight if weight.ndim == 3 else weight.unsqueeze(0)


def test_muon_six_steps_in_float64_equal_moonlights_formula() -> None:
    model = Experts().double()
    starts = copy.deepcopy(model)
    train(model, build(model, ns_dtype="float64").step)
    gradients = [draw(model, number) for number in range(STEPS)]
    for name in ("wide.weight", "tall.weight", "up.weight", "down.weight"):
        weights = as_matrices(model.get_parameter(name))
        matrices = as_matrices(starts.get_parameter(name))
        of_steps = [as_matrices(each[name]) for each in gradients]
        for weight, start, *grads in zip(weights, matrices, *of_steps, strict=True):
            expected = moonlight(start, grads)
            torch.testing.assert_close(weight, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("shape", "gathers"), [((40, 24), 1), ((24, 40), 1), ((6, 40, 24), 0)])
def test_orthogonalize_gathers_a_sharded_matrix_once(shape: tuple[int, ...], gathers: int) -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        update = distribute_tensor(
            torch.randn(shape), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None
        )
        with CommDebugMode() as collectives:
            found = orthogonalize(update, torch.float32)
    finally:
        dist.destroy_process_group()
    assert collectives.get_total_counts() == gathers
    assert isinstance(found, DTensor)
    assert found.placements == update.placements and found.shape == update.shape


def test_muon_expert_without_gradient_moves_by_decay_only() -> None:
    model = nn.ModuleList([ScaledLinear(8, 6, batch_dims=(3,))])
    (weight,) = model.parameters()
    before = weight.detach().clone()
    weight.grad = torch.randn(weight.shape)
    weight.grad[1] = 0
    build(model).step()
    update = weight.detach() - before * (1 - LR * 0.1)
    assert update.isfinite().all() and update[0].abs().max() > 0
    torch.testing.assert_close(update[1], torch.zeros(6, 8), rtol=0, atol=1e-7)


def test_muon_parameters_without_gradient_unchanged() -> None:
    model = Experts()
    model.wide.weight.requires_grad_(False)
    optimizer = build(model)
    still = {"tall.weight", "down.weight", "head.weight"}
    before = copy.deepcopy(model)
    for name, parameter in model.named_parameters():
        parameter.grad = None if name in still else torch.randn_like(parameter)
    optimizer.step()
    pairs = zip(model.named_parameters(), before.parameters(), strict=True)
    moved = {name for (name, after), start in pairs if not torch.equal(after, start)}
    assert moved == {name for name, _ in model.named_parameters()} - still - {"wide.weight"}
    assert len(optimizer.state) == len(moved)


def test_stacks_of_small_matrices_equal_single_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [
        nn.Parameter(torch.randn(s))
        for s in ((8, 4), (4, 8), (8, 4), (8, 4), (3, 8, 4), (200, 100), (200, 100))
    ]
    assert sorted(len(alike) for alike in muon.stacks(made)) == [1, 1, 1, 1, 3]
    apart = nn.ParameterList(made)
    together = copy.deepcopy(apart)
    for parameters, matrix in ((apart, 0), (together, 1 << 14)):
        monkeypatch.setitem(muon.STACK_MATRIX, "cpu", matrix)
        optimizer = Muon([{"params": list(parameters), "weight_decay": 0.1}], LR, 0.95, "float64")
        train(parameters.double(), optimizer.step)
    torch.testing.assert_close(list(together), list(apart), rtol=1e-10, atol=1e-12)


def test_muon_under_one_cycle_needs_constant_momentum() -> None:
    with pytest.raises(ValueError, match="cycle_momentum"):  # its AdamW part has beta1 instead
        OneCycleLR(build(Experts()), max_lr=1.0, total_steps=4)

    optimizer = build(Experts())
    OneCycleLR(optimizer, max_lr=1.0, total_steps=4, cycle_momentum=False)
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates == pytest.approx([1 / 25] * len(rates))
