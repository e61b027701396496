"""Short trainings of the package's models and of AdamW on noise, to measure quantities.

A Llama of 32 channels and two blocks trains on bytes of the standard library's sources, in seconds.
"""

import itertools
import math
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_sv.nn import Backbone, BackboneConfig
from lightning_sv.optim import OptimConfig, ScheduleConfig, build_optimizer, role_groups
from lightning_sv.scale import ScaledLinear
from lightning_sv.theory.series import Array

#: modules whose sources are the text; the last tenth is held out
TEXT = ("argparse", "ast", "inspect", "typing", "doctest", "tarfile", "pdb", "pydoc")
#: initial std of the matrices that a run does not vary
STD = 0.08
#: sequences per step, of LENGTH tokens each
SEQUENCES = 8
LENGTH = 32


class ShortRun(NamedTuple):
    """Measurements during T steps, for the k matrices q, k, v, gate, up of every block."""

    radii: Array  #: rms of their entries before every step and after the last, (T + 1, k)
    relative_steps: Array  #: ‖ΔW‖ / ‖W‖ of every step, including decay, (T, k)
    loss: float  #: final loss on held-out text, in nats per byte


def rates(steps: int, peak: float) -> Array:
    """Return the learning rate of every step: 10% warm-up and the paper's cosine, (steps,)."""
    schedule = ScheduleConfig(warmup_ratio=0.1)
    return np.array([peak * schedule.factor(step, steps) for step in range(steps)])


def windows(count: int, seed: int, *, held_out: bool = False) -> Tensor:
    """Return windows of the text at random positions, as tokens below 256, (count, LENGTH + 1)."""
    training, ending = _texts()
    tokens = ending if held_out else training
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(tokens) - LENGTH, (count, 1), generator=generator)
    return tokens[starts + torch.arange(LENGTH + 1)]


def _texts() -> tuple[Tensor, Tensor]:
    """Return the tokens of the text for training, and of its last tenth, which is held out."""
    content = b""
    for spec in map(find_spec, TEXT):
        if spec is not None and spec.origin is not None:
            content += Path(spec.origin).read_bytes()
    tokens = torch.tensor(np.frombuffer(content, dtype=np.uint8).astype(np.int64))
    cut = len(tokens) * 9 // 10
    return tokens[:cut], tokens[cut:]


def batches(steps: int) -> Tensor:
    """Return the sequences of every step, (steps, SEQUENCES, LENGTH + 1)."""
    return windows(steps * SEQUENCES, 0).view(steps, SEQUENCES, -1)


class SmallModel(NamedTuple):
    """A Llama, and those of its matrices that read a normalized input."""

    backbone: Backbone
    readers: list[Tensor]  #: scale-invariant under dnp


def small_model(
    strategy: str, factor: float, *, with_head: bool = False, eps: float = 1e-5
) -> SmallModel:
    """Return a Llama whose readers are multiplied by a factor.

    Equal seeds give equal matrices under every strategy.

    Args:
        strategy: strategy of the scale vectors
        factor: number by which q, k, v, gate and up are multiplied
        with_head: if True, the lm_head is one of the readers too
        eps: ε of the norms
    """
    config = BackboneConfig(
        d_model=32, n_layer=2, n_head=2, vocab_size=256, init_std=STD, norm_eps=eps
    )
    model = Backbone(config, strategy)
    linears = [module for module in model.modules() if isinstance(module, ScaledLinear)]
    readers: list[Tensor] = []
    for module in linears:
        if with_head or module.role == "matrix":
            readers.append(module.weight)
    with torch.no_grad():
        for weight in readers:
            weight.mul_(factor)
    return SmallModel(model, readers)


def take_step(
    model: Backbone, optimizer: torch.optim.Optimizer, batch: Tensor, clip: float = math.inf
) -> float:
    """Take a step on a batch, with the gradient's norm clipped; return the loss before it."""
    loss = model(batch[:, :-1], targets=batch[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return float(loss.item())


def train(strategy: str, std: float, *, steps: int, peak: float, decay: float) -> ShortRun:
    """Train with q, k, v, gate and up initialized at `std`, and all other matrices at STD.

    The optimizer is AdamW, with the package's schedule from the learning rate `peak` after warm-up,
    and clipping at 1.
    """
    model, readers = small_model(strategy, std / STD)
    groups = role_groups(model, model.strategy.decayed_roles)
    optimizer = build_optimizer(groups, OptimConfig(weight_decay=decay), peak)
    states = [_copies(readers)]
    for batch, rate in zip(batches(steps), rates(steps, peak), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = float(rate)
        take_step(model, optimizer, batch, clip=1.0)
        states.append(_copies(readers))

    radii = [[float(weight.square().mean().sqrt()) for weight in state] for state in states]
    moves = [_relative_changes(old, new) for old, new in itertools.pairwise(states)]
    ending = windows(256, 1, held_out=True)
    with torch.no_grad():
        final = float(model(ending[:, :-1], targets=ending[:, 1:]))
    return ShortRun(np.array(radii), np.array(moves), final)


def _copies(weights: list[Tensor]) -> list[Tensor]:
    return [weight.detach().clone() for weight in weights]


def _relative_changes(old: list[Tensor], new: list[Tensor]) -> list[float]:
    """Return ‖new − old‖ / ‖old‖ of each matrix."""
    return [
        float((after - before).norm() / before.norm())
        for before, after in zip(old, new, strict=True)
    ]


def losses_of_rescaled(strategy: str, factor: float, steps: int = 8) -> Array:
    """Return the losses of a float64 run whose readers and their rates are multiplied by `factor`.

    Their decay is divided by it. The ε of the norms and of AdamW are negligible, so matrices behind
    a norm are scale-invariant up to rounding. Powers of 2 cause no rounding. Shape: (steps,).
    """
    model, readers = small_model(strategy, factor, with_head=True, eps=1e-30)
    model.double()
    others = [p for p in model.parameters() if all(p is not weight for weight in readers)]
    rate = 0.006
    decay = 0.1
    groups = [{"params": readers, "lr": factor * rate, "weight_decay": decay / factor}]
    groups += [{"params": others, "lr": rate, "weight_decay": decay}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-30)
    return np.array([take_step(model, optimizer, batch) for batch in batches(steps)])


class NoiseRun(NamedTuple):
    """Measurements of a vector W during T steps on noise."""

    radii: Array  #: rms of its entries before every step and after the last, (T + 1,)
    relative_steps: Array  #: ‖ΔW‖ / ‖W‖ of every step, without its decay, (T,)


def simulate_radius(start: float, learning_rates: Array, decay: float) -> NoiseRun:
    """Run AdamW (β = 0.9, 0.95, no ε) on scale-invariant noise.

    The loss is ⟨ξ_t, W/‖W‖⟩ with fresh ξ_t ~ N(0, I_n).

    Args:
        start: initial rms of W
        learning_rates: learning rate of each step, (T,)
        decay: weight decay λ
    """
    n = 4000
    rng = np.random.default_rng(0)
    w = torch.tensor(rng.standard_normal(n))
    w *= start * n**0.5 / w.norm()
    optimizer = torch.optim.AdamW([w], betas=(0.9, 0.95), eps=0.0, weight_decay=decay)
    radii = [start]
    relative_steps = []
    for rate in learning_rates:
        before = w.clone()
        length = w.norm()
        noise = torch.tensor(rng.standard_normal(n))
        w.grad = (noise - w * (w @ noise) / length**2) / length  # orthogonal to W
        optimizer.param_groups[0]["lr"] = float(rate)
        optimizer.step()
        update = w - (1 - rate * decay) * before
        relative_steps.append(float(update.norm() / length))
        radii.append(float(w.norm()) / n**0.5)
    return NoiseRun(np.array(radii), np.array(relative_steps))
