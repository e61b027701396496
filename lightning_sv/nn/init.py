"""Initialization seeded by parameter name.

A matrix has the same initial values under every strategy and on any number of devices. Strategies
therefore start as the same function and can be compared in pairs.
"""

import hashlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lightning_sv.nn.config import BackboneConfig
from lightning_sv.scale import ScaledLinear, ScaleVector

#: matrices whose outputs are added to the residual stream
RESIDUAL_WRITERS = ("o_proj.weight", "down_proj.weight")


@torch.no_grad()
def init_weights(model: nn.Module, config: BackboneConfig, seed: int, *, prefix: str = "") -> None:
    """Initialize all parameters: matrices N(0, std^2), scale vectors with their initial gamma.

    The std is `init_std`, or that of the matrix's role in `init_std_by_role`. For o_proj and
    down_proj, which write to the residual stream, it is divided by sqrt(2 n_layer) if
    `init_residual_scaling` is on.

    Args:
        model: a model on any device except meta
        config: configuration with the standard deviations
        seed: seed; each parameter's values depend on it and on the parameter's name
        prefix: prefix of the names if `model` is a part of a backbone, e.g. 'layers.0.'
    """
    in_vectors: set[Tensor] = set()
    for vector in outer_scale_vectors(model):
        vector.reset_parameters()
        in_vectors.update(vector.parameters())

    roles = matrix_roles(model)
    for name, parameter in model.named_parameters():
        if parameter in in_vectors:
            continue
        role = roles.get(parameter, "matrix")
        std = config.init_std_by_role.get(role, config.init_std)
        if config.init_residual_scaling and name.endswith(RESIDUAL_WRITERS):
            std /= math.sqrt(2 * config.n_layer)
        fill_normal(parameter, std, generator_of(f"{seed}:{prefix}{name}"))


def fill_normal(parameter: Tensor, std: float, generator: torch.Generator) -> None:
    """Fill with N(0, std^2), sampled in float32 on the CPU: equal values on every device."""
    device = "cpu"  # Lightning sets another default
    sample = torch.randn(parameter.shape, generator=generator, device=device, dtype=torch.float32)
    parameter.copy_(sample.mul_(std))


def generator_of(key: str) -> torch.Generator:
    """Return a CPU generator seeded by a string."""
    digest = hashlib.sha256(key.encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def outer_scale_vectors(model: nn.Module) -> Iterator[ScaleVector]:
    """Yield the scale vectors that are not a part of another one, which sets its parts itself."""
    parts: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, ScaleVector) and module not in parts:
            parts.update(module.modules())
            yield module


def matrix_roles(model: nn.Module) -> dict[Tensor, str]:
    """Return the role of the matrices that are not plain linear maps."""
    roles: dict[Tensor, str] = {}
    for module in model.modules():
        if isinstance(module, ScaledLinear):
            roles[module.weight] = module.role
        elif isinstance(module, nn.Embedding):
            roles[module.weight] = "embedding"
    return roles
