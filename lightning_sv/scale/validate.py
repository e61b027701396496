"""The contract of `ScaleVector`, checked on a class of the user's own before a model is built.

A wrong class would not fail by itself: a gamma that is not 1 at initialization makes strategies
incomparable, a parameter without a gradient is never trained, and one that `set_gamma` leaves unset
has arbitrary values after FSDP2 has given it memory. Each check names the class, what is wrong, and
what to do.
"""

from functools import cache

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from lightning_sv.errors import ConfigError, expect
from lightning_sv.scale.vector import ScaleVector

#: Width of the vectors on which a class is checked.
WIDTH = 64
TOLERANCE = 1e-3


@cache
def check_parameterization(kind: type[ScaleVector]) -> None:
    """Build `kind` with and without batch dimensions and check the contract of `ScaleVector`.

    Args:
        kind: a subclass of ScaleVector, usually from the user's own module

    Raises:
        ConfigError: the signature is not that of `ScaleVector`; there is no parameter, one is a
            scalar, or gamma does not depend on one; gamma's shape is not (*batch_dims, d), or gamma
            is not 1 initially; `set_gamma` is not the inverse of `forward`, or leaves a parameter
            unset
    """
    name = f"the parameterization {kind.__module__}:{kind.__qualname__}"
    on_cpu = torch.device("cpu")
    keep_random_state = torch.random.fork_rng(devices=[])
    with unset_fake_temporarily(), on_cpu, keep_random_state, torch.enable_grad():
        _check(name, kind, batch_dims=())
        _check(name, kind, batch_dims=(2,))


def _check(name: str, kind: type[ScaleVector], batch_dims: tuple[int, ...]) -> None:
    vector = _build(name, kind, batch_dims)
    if vector is None:
        return
    ones = torch.ones(*batch_dims, WIDTH)
    _check_has_no_constants(name, vector)
    trainable = _trainable_parameters(name, vector)
    _check_set_gamma_sets_all(name, vector, ones)
    _check_reset(name, vector, ones)
    _check_gradients(name, vector, trainable)
    _check_gamma(name, vector, torch.linspace(0.5, 1.5, WIDTH).expand_as(ones))


def _build(name: str, kind: type[ScaleVector], batch_dims: tuple[int, ...]) -> ScaleVector | None:
    """Return a vector; None if the class rejects the width, which the model will report."""
    try:
        return kind(WIDTH, "input", batch_dims)
    except ValueError:
        return None
    except Exception as error:
        expected = "an __init__(d, role, batch_dims=()) that passes them to super().__init__."
        raise ConfigError(f"{name} cannot be built ({error}); expected {expected}") from error


def _check_has_no_constants(name: str, vector: ScaleVector) -> None:
    """FSDP2 and copies of a model would leave constant tensors without values."""
    state = {**dict(vector.named_buffers()), **vars(vector)}
    for key, value in state.items():
        expected = "parameters and numbers alone. Compute constants in forward."
        expect(not isinstance(value, Tensor), name, f"a class with the tensor {key}", expected)


def _trainable_parameters(name: str, vector: ScaleVector) -> dict[str, nn.Parameter]:
    trainable = {key: p for key, p in vector.named_parameters() if p.requires_grad}
    if not trainable:
        raise ConfigError(f"{name} has no trainable nn.Parameter; create one in __init__.")
    for key, parameter in trainable.items():
        if parameter.ndim == 0:
            expected = "shape (*batch_dims, 1), for FSDP2."
            raise ConfigError(f"{name} has the scalar {key}; expected {expected}")
    return trainable


def _check_set_gamma_sets_all(name: str, vector: ScaleVector, ones: Tensor) -> None:
    """Fill the parameters with nan, as FSDP2 leaves any value in them, and set gamma to 1."""
    with torch.no_grad():
        for parameter in vector.parameters():
            parameter.fill_(torch.nan)
    _check_gamma(name, vector, ones)
    for key, parameter in vector.named_parameters():
        if parameter.isnan().any():
            found = f"has {key}, which set_gamma leaves unset; FSDP2 creates it without values"
            hint = "Set every parameter in set_gamma, without random numbers."
            raise ConfigError(f"{name} {found}. {hint}")


def _check_reset(name: str, vector: ScaleVector, ones: Tensor) -> None:
    vector.reset_parameters()
    gamma = vector().detach()
    if (gamma - ones).abs().max() > TOLERANCE:
        hint = "Override reset_parameters too, which its base class defines."
        raise ConfigError(
            f"{name} starts at a gamma of {gamma.flatten()[0]:.4g}; expected 1. {hint}"
        )


def _check_gradients(name: str, vector: ScaleVector, trainable: dict[str, nn.Parameter]) -> None:
    gamma = vector()
    if gamma.requires_grad:
        gamma.sum().backward()
    unused = [key for key, parameter in trainable.items() if parameter.grad is None]
    if unused:
        hint = "compute gamma in forward from the parameter itself, without detach() or .data."
        raise ConfigError(f"{name} gives {', '.join(unused)} no gradient; {hint}")


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
        found = f"fails in set_gamma or forward with batch_dims {vector.batch_dims} ({error})"
        hint = "write under @torch.no_grad() and let each parameter's shape begin with batch_dims."
        raise ConfigError(f"{name} {found}; {hint}") from error

    if gamma.shape != target.shape:
        shape = tuple(target.shape)
        expected = f"(*batch_dims, d), here {shape}: each expert has its own vector."
        raise ConfigError(
            f"{name} returns a gamma of shape {tuple(gamma.shape)}; expected {expected}"
        )
    distance = (gamma - target).abs().nan_to_num(torch.inf).flatten()
    if distance.max() > TOLERANCE:
        worst = distance.argmax()
        found = (
            f"returns {gamma.flatten()[worst]:.4g} after set_gamma({target.flatten()[worst]:.4g})"
        )
        hint = "set_gamma must set the parameters so that forward returns gamma."
        raise ConfigError(f"{name} {found}; {hint}")
