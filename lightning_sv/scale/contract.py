"""Checks of a custom parameterization on a small vector, before a model is built."""

from functools import cache

import torch
from torch import Tensor

from lightning_sv.errors import ConfigError
from lightning_sv.scale.vector import ScaleVector

_D = 64


@cache
def check_parameterization(kind: type[ScaleVector]) -> None:
    """Build `kind` with and without batch dimensions and check the contract of `ScaleVector`.

    Args:
        kind: a subclass of ScaleVector, usually from the user's own module

    Raises:
        ConfigError: the signature is not that of `ScaleVector`; there is no parameter, or gamma does not depend on
            one; gamma's shape is not (*batch_dims, d), or gamma is not 1 initially; `set_gamma` is not the inverse of
            `forward`
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily  # slow to import

    name = f"the parameterization {kind.__module__}:{kind.__qualname__}"
    if lacking := sorted(kind.__abstractmethods__):
        raise ConfigError(
            f"{name} does not define {' and '.join(lacking)}. forward() returns gamma, and set_gamma(gamma) sets it."
        )
    with unset_fake_temporarily(), torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.enable_grad():
        for batch_dims in ((), (2,)):
            _check(name, kind, batch_dims)


def _check(name: str, kind: type[ScaleVector], batch_dims: tuple[int, ...]) -> None:
    try:
        vector = kind(_D, "input", batch_dims)
    except ValueError:  # unsupported width; the error is raised when the model is built
        return
    except Exception as error:
        raise ConfigError(
            f"{name} cannot be built ({error}); expected an __init__(d, role, batch_dims=()) that passes them to "
            "super().__init__."
        ) from error
    trainable = {key: parameter for key, parameter in vector.named_parameters() if parameter.requires_grad}
    if not trainable:
        raise ConfigError(f"{name} has no trainable nn.Parameter; create one in __init__.")
    _check_gamma(name, vector, torch.ones(*batch_dims, _D))
    gamma = vector()
    if gamma.requires_grad:
        gamma.sum().backward()
    if unused := [key for key, parameter in trainable.items() if parameter.grad is None]:
        raise ConfigError(
            f"{name} gives {', '.join(unused)} no gradient; compute gamma in forward from the parameter itself, "
            "without detach() or .data."
        )
    _check_gamma(name, vector, torch.linspace(0.5, 1.5, _D).expand(*batch_dims, _D))


def _check_gamma(name: str, vector: ScaleVector, target: Tensor) -> None:
    """Set gamma to `target` and compare."""
    try:
        vector.set_gamma(target.clone())
        gamma = vector().detach()
    except ValueError:  # a parameterization may reject other values, but must represent 1
        if bool((target == 1).all()):
            raise
        return
    except Exception as error:
        raise ConfigError(
            f"{name} fails in set_gamma or forward with batch_dims {vector.batch_dims} ({error}); write under "
            "@torch.no_grad() and let the shape of each parameter begin with batch_dims."
        ) from error
    if gamma.shape != target.shape:
        raise ConfigError(
            f"{name} returns a gamma of shape {tuple(gamma.shape)}; expected (*batch_dims, d), here "
            f"{tuple(target.shape)}: each expert has its own vector."
        )
    off = (gamma - target).abs().nan_to_num(torch.inf).flatten()
    if off.max() > 1e-3:
        wrong = off.argmax()
        raise ConfigError(
            f"{name} returns {gamma.flatten()[wrong]:.4g} after set_gamma({target.flatten()[wrong]:.4g}); "
            "set_gamma must set the parameters so that forward returns gamma."
        )
