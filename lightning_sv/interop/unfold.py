"""The inverse of folding: a plain model's norms become the scale vectors of a strategy, with the same function."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_sv.errors import ConfigError
from lightning_sv.nn import Backbone
from lightning_sv.scale import BranchGroup, RMSNorm, ScaleVector


@torch.no_grad()
def unfold(model: Backbone, weights: Mapping[str, Tensor], norms: Mapping[str, Tensor]) -> None:
    """Fill a backbone with matrices and with what norms multiply by, so that it computes what they do.

    The gamma of a norm goes to the input-side vectors behind it, or into the matrices where the strategy has none there
    (`nop`, `ap`). Output-side vectors stay 1.

    Args:
        model: as it was initialized: every scale vector is 1
        weights: what is no scale vector, by its name in the state dict; changed in place
        norms: path of each RMSNorm -> its gamma, (d,)

    Raises:
        ConfigError: the strategy normalizes outputs (`dnp`), or a vector cannot represent its gamma
    """
    check_no_norm(model)
    groups = {path: module for path, module in model.named_modules() if isinstance(module, BranchGroup)}
    for path, group in groups.items():
        gamma = norms[f"{path}.norm"]
        own: dict[ScaleVector, Tensor | None] = {}  # vector -> the signs it cannot have
        for name in group.names:
            vector = group.vectors(name)[0]
            if vector is not None and vector not in own:
                own[vector] = _set(vector, gamma, f"{path}.{name}")
            columns = gamma if vector is None else own[vector]
            if columns is not None:
                weights[f"{path}.{name}.weight"].mul_(columns)
    fed = {f"{path}.norm" for path in groups}
    for path, norm in model.named_modules():
        if not isinstance(norm, RMSNorm) or path in fed:
            continue
        gamma = norms[path]
        left = gamma if norm.scale is None else _set(norm.scale, gamma, path)  # no matrix behind it could take it
        if left is not None and bool((left != 1).any()):
            raise ConfigError(
                f"{path}: the imported scale vector has values that the strategy {str(model.strategy)!r} has no place "
                "for; use another, for instance hg+dp+or+iwd."
            )
    missing, unexpected = model.load_state_dict(weights, strict=False)
    vectors = tuple(f"{path}." for path, module in model.named_modules() if isinstance(module, ScaleVector))
    assert not unexpected and all(name.startswith(vectors) for name in missing), (missing, unexpected)


def check_no_norm(model: Backbone) -> None:
    """Check that the strategy keeps the function of a plain model.

    Raises:
        ConfigError: it normalizes outputs
    """
    for path, group in model.named_modules():
        if isinstance(group, BranchGroup):
            for name, branch in group.branches():
                if branch.norm_width is not None:
                    raise ConfigError(
                        f"{path}.{name} normalizes its output under the strategy {str(model.strategy)!r}, which is "
                        "another function than the imported one; use one without dnp, for instance hg+dp+or+iwd."
                    )


def _set(vector: ScaleVector, gamma: Tensor, where: str) -> Tensor | None:
    """Set gamma; return the signs that the matrix behind it must take, where the vector has positive entries alone."""
    try:
        vector.set_gamma(gamma)
    except ValueError:
        try:
            vector.set_gamma(gamma.abs())
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from error
        return gamma.sign()
    return None
