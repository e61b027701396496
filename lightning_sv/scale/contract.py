"""Checks of a custom parameterization on a small vector, before a model is built."""

from functools import cache
from typing import NoReturn

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

    if lacking := sorted(kind.__abstractmethods__):
        _refuse(
            kind,
            f"does not define {' and '.join(lacking)}. forward() returns gamma, and set_gamma(gamma) sets it.",
        )
    with unset_fake_temporarily(), torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.enable_grad():
        for batch_dims in ((), (2,)):
            _check(kind, batch_dims)


def _check(kind: type[ScaleVector], batch_dims: tuple[int, ...]) -> None:
    try:
        vector = kind(_D, "input", batch_dims)
    except ValueError:  # unsupported width; the error is raised when the model is built
        return
    except Exception as error:
        _refuse(
            kind,
            f"cannot be built ({error}); expected an __init__(d, role, batch_dims=()) that passes them to "
            "super().__init__.",
        )
    trainable = {name: parameter for name, parameter in vector.named_parameters() if parameter.requires_grad}
    if not trainable:
        _refuse(kind, "has no trainable nn.Parameter; create one in __init__.")
    _check_gamma(vector, torch.ones(*batch_dims, _D), "is not 1 initially: after set_gamma(1), forward returns")
    gamma = vector()
    gradients: tuple[Tensor | None, ...] = (None,) * len(trainable)
    if gamma.requires_grad:
        gradients = torch.autograd.grad(gamma.sum(), list(trainable.values()), allow_unused=True)
    if unused := [name for name, gradient in zip(trainable, gradients, strict=True) if gradient is None]:
        _refuse(
            kind,
            f"gives {', '.join(unused)} no gradient; compute gamma in forward from the "
            "parameter itself, without detach() or .data.",
        )
    target = torch.linspace(0.5, 1.5, _D).expand(*batch_dims, _D)
    _check_gamma(
        vector, target, "has a set_gamma that is not the inverse of forward: for a gamma between 0.5 and 1.5 it returns"
    )


def _check_gamma(vector: ScaleVector, target: Tensor, wrong: str) -> None:
    """Set gamma to `target` and compare; `wrong` begins the error message."""
    try:
        vector.set_gamma(target.clone())
        gamma = vector().detach()
    except ValueError:  # a parameterization may reject other values, but must represent 1
        if bool((target == 1).all()):
            raise
        return
    except Exception as error:
        _refuse(
            type(vector),
            f"fails in set_gamma or forward with batch_dims {vector.batch_dims} ({error}); write under "
            "@torch.no_grad() and let the shape of each parameter begin with batch_dims.",
        )
    if gamma.shape != target.shape:
        _refuse(
            type(vector),
            f"returns a gamma of shape {tuple(gamma.shape)}; expected (*batch_dims, d), here {tuple(target.shape)}: "
            "each expert has its own vector.",
        )
    off = (gamma - target).abs().nan_to_num(torch.inf)
    if off.max() > 1e-3:
        value = f"{gamma.flatten()[off.argmax()]:.4g}"
        _refuse(
            type(vector), f"{wrong} {value}; set_gamma(gamma) must set the parameters so that forward returns gamma."
        )


def _refuse(kind: type[ScaleVector], what: str) -> NoReturn:
    raise ConfigError(f"the parameterization {kind.__module__}:{kind.__qualname__} {what}")
