"""Short runs of AdamW: a small Llama whose matrices are rescaled, and a vector on noise."""

from typing import NamedTuple

import numpy as np
import torch

from lightning_sv.nn import Backbone, BackboneConfig
from lightning_sv.scale import ScaledLinear
from lightning_sv.theory.series import Array


def losses_of_rescaled(strategy: str, factor: float) -> Array:
    """Return 8 losses of a float64 run whose readers and their rates are multiplied by `factor`.

    Readers are the matrices that read a normalized input: q, k, v, gate, up and lm_head. Under dnp
    they are scale-invariant. Their decay is divided by `factor`. The tokens are random.

    The ε of the norms and of AdamW are negligible, and powers of 2 cause no rounding.
    """
    config = BackboneConfig(
        d_model=32, n_layer=2, n_head=2, vocab_size=256, init_std=0.08, norm_eps=1e-30
    )
    model = Backbone(config, strategy).double()  # equal matrices under every strategy
    readers = [module.weight for module in model.modules() if isinstance(module, ScaledLinear)]
    others = [p for p in model.parameters() if all(p is not weight for weight in readers)]
    with torch.no_grad():
        for weight in readers:
            weight.mul_(factor)

    rate = 0.006
    decay = 0.1
    groups = [
        {"params": readers, "lr": factor * rate, "weight_decay": decay / factor},
        {"params": others, "lr": rate, "weight_decay": decay},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-30)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for batch in torch.randint(256, (8, 8, 33), generator=generator):
        loss = model(batch[:, :-1], targets=batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return np.array(losses)


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
