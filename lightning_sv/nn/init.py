"""Initialization seeded by parameter name.

A matrix has the same initial values under every strategy and on any number of devices. Strategies therefore start as
the same function and can be compared in pairs.
"""

import hashlib
import math

import torch
from torch import Tensor, nn

from lightning_sv.nn.config import BackboneConfig
from lightning_sv.scale import ScaledLinear, ScaleVector


@torch.no_grad()
def init_weights(model: nn.Module, config: BackboneConfig, seed: int, *, prefix: str = "") -> None:
    """Initialize all parameters: matrices N(0, std^2), scale vectors with their initial gamma.

    The std is `init_std`, or that of the matrix's role in `init_std_by_role`. For o_proj and down_proj, which write to
    the residual stream, it is divided by sqrt(2 n_layer) if `init_residual_scaling` is on.

    Args:
        model: a model on any device except meta
        config: configuration with the standard deviations
        seed: seed; each parameter's values depend on it and on the parameter's name
        prefix: prefix of the names if `model` is a part of a backbone, e.g. 'layers.0.'
    """
    vectors: set[Tensor] = set()
    inner: set[nn.Module] = set()  # parts of a vector, which it sets itself
    for module in model.modules():
        if isinstance(module, ScaleVector) and module not in inner:
            module.reset_parameters()
            vectors.update(module.parameters())
            inner.update(module.modules())
    roles: dict[Tensor, str] = {m.weight: m.role for m in model.modules() if isinstance(m, ScaledLinear)}
    roles |= {m.weight: "embedding" for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, parameter in model.named_parameters():
        if parameter in vectors:
            continue
        std = config.init_std_by_role.get(roles.get(parameter, "matrix"), config.init_std)
        if config.init_residual_scaling and name.endswith(("o_proj.weight", "down_proj.weight")):
            std /= math.sqrt(2 * config.n_layer)
        # Sample in float32 on the CPU, so that values do not depend on the device; Lightning sets a default device.
        digest = hashlib.sha256(f"{seed}:{prefix}{name}".encode()).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        # Do not assign the values to a variable: it would keep a matrix in memory until the next one is sampled.
        parameter.copy_(torch.randn(parameter.shape, generator=generator, device="cpu", dtype=torch.float32).mul_(std))
