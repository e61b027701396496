"""The contract of `ScaleVector`, checked on a class of the user's own before a model is built.

A wrong class would not fail by itself: a gamma that is not 1 at initialization makes strategies
incomparable, a parameter without a gradient is never trained, and one that `set_gamma` leaves unset
has arbitrary values after FSDP2 has given it memory. Each check names the class, what is wrong, and
what to do.
"""

from collections.abc import Iterator, Sequence
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
        ConfigError: the signature is not that of `ScaleVector`; there is no parameter, one is a
            scalar, or gamma does not depend on one; gamma's shape is not (*batch_dims, d), or gamma
            is not 1 initially; `set_gamma` is not the inverse of `forward`, or leaves a parameter
            unset
    """
    on_cpu = torch.device("cpu")
    keep_random_state = torch.random.fork_rng(devices=[])
    with unset_fake_temporarily(), on_cpu, keep_random_state, torch.enable_grad():
        for batch_dims in ((), (2,)):
            fault = next(_faults(kind, batch_dims), None)
            if fault is not None:
                name = f"the parameterization {kind.__module__}:{kind.__qualname__}"
                raise ConfigError(f"{name} {fault}")


def _faults(kind: type[ScaleVector], batch_dims: Sequence[int]) -> Iterator[str]:
    """Yield what is wrong; each check relies on those before it."""
    try:
        vector = kind(WIDTH, "input", batch_dims)
    except ValueError:
        return  # the class rejects the width, which the model will report
    except Exception as error:
        wanted = "an __init__(d, role, batch_dims=()) that passes them to super().__init__"
        yield f"cannot be built ({error}); expected {wanted}."
        return

    ones = torch.ones(*batch_dims, WIDTH)
    yield from _faults_of_tensors(vector)
    yield from _faults_of_unset(vector, ones)

    vector.reset_parameters()
    start = vector()
    if (start - ones).abs().max() > TOLERANCE:
        hint = "Override reset_parameters too, which its base class defines."
        yield f"starts at a gamma of {start.flatten()[0]:.4g}; expected 1. {hint}"
    if start.requires_grad:
        start.sum().backward()
    for key, parameter in vector.named_parameters():
        if parameter.requires_grad and parameter.grad is None:
            hint = "compute gamma in forward from the parameter itself, without detach() or .data."
            yield f"gives {key} no gradient; {hint}"

    target = torch.linspace(0.5, 1.5, WIDTH).expand_as(ones)
    yield from _faults_of_inverse(vector, target)


def _faults_of_tensors(vector: ScaleVector) -> Iterator[str]:
    """Yield faults of buffers and parameters, which FSDP2 would leave without values or refuse."""
    for key, value in {**dict(vector.named_buffers()), **vars(vector)}.items():
        if isinstance(value, Tensor):
            hint = "expected parameters and numbers alone. Compute constants in forward."
            yield f"is a class with the tensor {key}; {hint}"
    trainable = {key: p for key, p in vector.named_parameters() if p.requires_grad}
    if not trainable:
        yield "has no trainable nn.Parameter; create one in __init__."
    for key, parameter in trainable.items():
        if parameter.ndim == 0:
            yield f"has the scalar {key}; expected shape (*batch_dims, 1), for FSDP2."


def _faults_of_unset(vector: ScaleVector, ones: Tensor) -> Iterator[str]:
    """Fill the parameters with nan, as FSDP2 leaves any value in them, and set gamma to 1."""
    with torch.no_grad():
        for parameter in vector.parameters():
            parameter.fill_(torch.nan)
    yield from _faults_of_inverse(vector, ones)
    for key, parameter in vector.named_parameters():
        if parameter.isnan().any():
            why = "which set_gamma leaves unset; FSDP2 creates it without values"
            hint = "Set every parameter in set_gamma, without random numbers."
            yield f"has {key}, {why}. {hint}"


def _faults_of_inverse(vector: ScaleVector, target: Tensor) -> Iterator[str]:
    """Set gamma to `target` and compare."""
    try:
        vector.set_gamma(target.clone())
        gamma = vector().detach()
    except ValueError:  # a parameterization may reject other values, but must represent 1
        if bool((target == 1).all()):
            raise
        return
    except Exception as error:
        hint = "write under @torch.no_grad() and let each parameter's shape begin with batch_dims."
        where = f"set_gamma or forward with batch_dims {vector.batch_dims}"
        yield f"fails in {where} ({error}); {hint}"
        return

    if gamma.shape != target.shape:
        wanted = f"(*batch_dims, d), here {tuple(target.shape)}: each expert has its own vector"
        yield f"returns a gamma of shape {tuple(gamma.shape)}; expected {wanted}."
    distance = (gamma - target).abs().nan_to_num(torch.inf).flatten()
    if distance.max() > TOLERANCE:
        worst = distance.argmax()
        call = f"set_gamma({target.flatten()[worst]:.4g})"
        hint = "set_gamma must set the parameters so that forward returns gamma."
        yield f"returns {gamma.flatten()[worst]:.4g} after {call}; {hint}"
