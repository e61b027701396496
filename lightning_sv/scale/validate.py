"""The contract of `ScaleVector`, checked on a class of the user's own before a model is built.

A wrong class would not fail by itself: a gamma that is not 1 at initialization makes strategies
incomparable, a parameter without a gradient is never trained, and one that `set_gamma` leaves unset
has arbitrary values after FSDP2 has given it memory. Each check names the class, what is wrong, and
what to do.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from lightning_sv.errors import ConfigError
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
        ConfigError: there is no parameter, or gamma does not depend on one; gamma's shape is not
            (*batch_dims, d), or gamma is not 1 initially; `set_gamma` is not the inverse of
            `forward`, or leaves a parameter unset
    """
    on_cpu = torch.device("cpu")
    keep_random_state = torch.random.fork_rng(devices=[])
    with unset_fake_temporarily(), on_cpu, keep_random_state, torch.enable_grad():
        for batch_dims in ((), (2,)):
            _check(kind, batch_dims)


def _check(kind: type[ScaleVector], batch_dims: Sequence[int]) -> None:
    """Check one vector; each check relies on those before it."""
    try:
        vector = kind(WIDTH, "input", batch_dims)
    except ValueError:
        return  # the class rejects the width, which the model will report

    _check_tensors(vector)
    ones = torch.ones(*batch_dims, WIDTH)
    _check_unset(vector, ones)
    _check_start(vector, ones)
    _check_gradients(vector)
    _check_inverse(vector, torch.linspace(0.5, 1.5, WIDTH).expand_as(ones))


def _fault(kind: type[ScaleVector], found: str) -> ConfigError:
    return ConfigError(f"the parameterization {kind.__module__}:{kind.__qualname__} {found}")


def _check_tensors(vector: ScaleVector) -> None:
    """Refuse buffers, which FSDP2 would leave without values."""
    kind = type(vector)
    constants = {**dict(vector.named_buffers()), **vars(vector)}
    for key, value in constants.items():
        if isinstance(value, Tensor):
            hint = "expected parameters and numbers alone. Compute constants in forward."
            raise _fault(kind, f"is a class with the tensor {key}; {hint}")

    if not _trained_parameters(vector):
        raise _fault(kind, "has no trainable nn.Parameter; create one in __init__.")


def _trained_parameters(vector: ScaleVector) -> dict[str, Tensor]:
    return {name: p for name, p in vector.named_parameters() if p.requires_grad}


def _check_unset(vector: ScaleVector, ones: Tensor) -> None:
    """Fill the parameters with nan, as FSDP2 leaves any value in them, and set gamma to 1."""
    with torch.no_grad():
        for parameter in vector.parameters():
            parameter.fill_(torch.nan)
    _check_inverse(vector, ones)
    for key, parameter in vector.named_parameters():
        if parameter.isnan().any():
            why = "which set_gamma leaves unset; FSDP2 creates it without values"
            hint = "Set every parameter in set_gamma, without random numbers."
            raise _fault(type(vector), f"has {key}, {why}. {hint}")


def _check_start(vector: ScaleVector, ones: Tensor) -> None:
    """Check that gamma is 1 at initialization."""
    vector.reset_parameters()
    gamma = vector()
    if (gamma - ones).abs().max() > TOLERANCE:
        found = f"starts at a gamma of {gamma.flatten()[0]:.4g}; expected 1"
        hint = "Override reset_parameters too, which its base class defines."
        raise _fault(type(vector), f"{found}. {hint}")


def _check_gradients(vector: ScaleVector) -> None:
    """Check that gamma depends on every trained parameter."""
    gamma = vector()
    if gamma.requires_grad:
        gamma.sum().backward()
    for key, parameter in _trained_parameters(vector).items():
        if parameter.grad is None:
            hint = "compute gamma in forward from the parameter itself, without detach() or .data."
            raise _fault(type(vector), f"gives {key} no gradient; {hint}")


def _check_inverse(vector: ScaleVector, target: Tensor) -> None:
    """Set gamma to `target` and compare."""
    kind = type(vector)
    try:
        vector.set_gamma(target.clone())
        gamma = vector().detach()
    except ValueError:  # a parameterization may reject other values, but must represent 1
        if bool((target == 1).all()):
            raise
        return

    if gamma.shape != target.shape:
        expected = f"(*batch_dims, d), here {tuple(target.shape)}: each expert has its own vector"
        found = f"returns a gamma of shape {tuple(gamma.shape)}"
        raise _fault(kind, f"{found}; expected {expected}.")
    distance = (gamma - target).abs().nan_to_num(torch.inf).flatten()
    if distance.max() > TOLERANCE:
        worst = distance.argmax()
        call = f"set_gamma({target.flatten()[worst]:.4g})"
        hint = "set_gamma must set the parameters so that forward returns gamma."
        raise _fault(kind, f"returns {gamma.flatten()[worst]:.4g} after {call}; {hint}")
