"""What a parameterization of one's own must keep to, tried on a small vector before a model is built."""

from functools import cache
from typing import NoReturn

import torch
from torch import Tensor

from lightning_sv.errors import ConfigError
from lightning_sv.scale.vector import ScaleVector

_D = 64


@cache
def check_parameterization(kind: type[ScaleVector]) -> None:
    """Build `kind` for one vector and for two of them, and try what models, folding and export rely on.

    Args:
        kind: a subclass, of the user's own module as a rule

    Raises:
        ConfigError: it cannot be built as `ScaleVector` is; it has no parameter, or one that gamma does not depend on;
            gamma has another shape than (*batch_dims, d), or is not 1 at the start; `set_gamma` is no inverse of
            `forward`
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily  # slow to import, and few have their own

    if lacking := sorted(kind.__abstractmethods__):
        _refuse(kind, f"lacks {' and '.join(lacking)}; forward returns gamma, set_gamma(gamma) makes it return that.")
    with unset_fake_temporarily(), torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.enable_grad():
        for batch_dims in ((), (2,)):
            _check(kind, batch_dims)


def _check(kind: type[ScaleVector], batch_dims: tuple[int, ...]) -> None:
    try:
        vector = kind(_D, "input", batch_dims)
    except ValueError:  # a width that it cannot have: its own words come with the model's
        return
    except Exception as error:
        _refuse(
            kind,
            f"cannot be built ({error}); its __init__ takes (d, role, batch_dims=()) and passes them to "
            "super().__init__.",
        )
    learned = {name: parameter for name, parameter in vector.named_parameters() if parameter.requires_grad}
    if not learned:
        _refuse(kind, "has no nn.Parameter, so that nothing is learned; make one in __init__.")
    _check_gamma(vector, torch.ones(*batch_dims, _D), "is not 1 at the start: after set_gamma(1) forward gives")
    gamma = vector()
    gradients: tuple[Tensor | None, ...] = (None,) * len(learned)
    if gamma.requires_grad:
        gradients = torch.autograd.grad(gamma.sum(), list(learned.values()), allow_unused=True)
    if lost := [name for name, gradient in zip(learned, gradients, strict=True) if gradient is None]:
        _refuse(
            kind,
            f"does not learn {', '.join(lost)}: no gradient of gamma reaches it; compute gamma in forward from the "
            "parameter itself, without detach() or .data.",
        )
    target = torch.linspace(0.5, 1.5, _D).expand(*batch_dims, _D)
    _check_gamma(
        vector, target, "has a set_gamma that is no inverse of forward: of a gamma between 0.5 and 1.5 it makes"
    )


def _check_gamma(vector: ScaleVector, target: Tensor, wrong: str) -> None:
    """Set gamma to `target` and read it again; `wrong` says what it is where another comes back."""
    try:
        vector.set_gamma(target.clone())
        gamma = vector().detach()
    except ValueError:  # it cannot be this gamma, and says so; 1 it must be
        if bool((target == 1).all()):
            raise
        return
    except Exception as error:
        _refuse(
            type(vector),
            f"fails in set_gamma or forward with batch_dims {vector.batch_dims} ({error}); set_gamma writes under "
            "@torch.no_grad(), and parameters begin with batch_dims.",
        )
    if gamma.shape != target.shape:
        _refuse(
            type(vector),
            f"gives a gamma of shape {tuple(gamma.shape)} where (*batch_dims, d) is {tuple(target.shape)}: in a "
            "mixture each expert has a vector of its own.",
        )
    off = (gamma - target).abs().nan_to_num(torch.inf)
    if off.max() > 1e-3:
        made = f"{gamma.flatten()[off.argmax()]:.4g}"
        _refuse(type(vector), f"{wrong} {made}; set_gamma(gamma) sets the parameters for which forward returns gamma.")


def _refuse(kind: type[ScaleVector], what: str) -> NoReturn:
    raise ConfigError(f"the parameterization {kind.__module__}:{kind.__qualname__} {what}")
