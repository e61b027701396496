"""Folding: the same function with as few scale vectors as possible.

See the paper, Section 2.1. A gamma next to a matrix is a diagonal factor of it. Behind the norm of
`dnp` it can only move into the next matrix A, if what lies between is linear in it:

    gamma_out * (W (gamma_in * xhat))      W <- diag(gamma_out) W diag(gamma_in)
    gamma_out * Norm(W xhat) -> A          A <- A diag(gamma_out): attention averages v's channels,
                                           and the gate multiplies up's
    gamma_out * Norm(W xhat) -> other      stays: scores of q and k, SiLU, residual stream, logits
"""

from collections.abc import Iterator, Mapping, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sv.errors import expect
from lightning_sv.nn import Backbone, meta_backbone
from lightning_sv.scale import (
    BranchGroup,
    RMSNorm,
    ScaledLinear,
    ScaleOptions,
    ScaleVector,
    output_norms,
    scaled_linears,
)
from lightning_sv.scale.vector import HeadShared

#: branch -> the matrix, outside its group, that reads it through sums and products only
_READERS = {"v_proj": "o_proj"} | {
    f"{kind}up_proj": f"{kind}down_proj" for kind in ("", "shared_", "expert_")
}
_SCORES = (
    "after their norm, queries and keys are rotated and multiplied with each other, "
    "not with a matrix"
)
_RESIDUAL = "after its norm, it is added to the residual stream, without a matrix"
_SILU = "its norm is followed by SiLU, which is not linear"
#: reason why the vector after a norm cannot be folded, by the last part of the norm's path
_STAYS = {
    **dict.fromkeys(("q_proj", "k_proj", "q_norm", "k_norm"), _SCORES),
    **dict.fromkeys(("gate_proj", "shared_gate_proj", "expert_gate_proj"), _SILU),
    **dict.fromkeys(("attn_post_norm", "ffn_post_norm"), _RESIDUAL),
    "lm_head": "its norm returns the logits, without a further matrix",
}


class Folding(NamedTuple):
    """Result of folding one scale vector.

    Attributes:
        vector: site and side, 'layers.0.attn.qkv.q_proj.scale_out'; a shared vector has a row per
            branch
        into: path of the matrix that absorbs it; None if it stays
        why: reason why it stays; '' if it folds
    """

    vector: str
    into: str | None
    why: str = ""


def foldable(model: Backbone) -> list[Folding]:
    """Return a row per scale vector: the matrix it folds into, or why it stays."""
    return [row for _, row in foldings(model)]


def foldings(model: Backbone) -> Iterator[tuple[ScaleVector, Folding]]:
    """Yield the scale vectors with their rows of `foldable`."""
    _expect_backbone(model)
    for site, branch, (scale_in, scale_out) in scaled_linears(model):
        if scale_in is not None:
            yield scale_in, Folding(f"{site}.scale_in", site)
        if scale_out is not None:
            yield scale_out, _folding_of_output(site, branch)
    for path, norm in output_norms(model):
        assert norm.scale is not None
        yield norm.scale, Folding(f"{path}.scale", None, _STAYS[_last_part(path)])


def _folding_of_output(site: str, branch: ScaledLinear) -> Folding:
    """Return what becomes of the vector after a branch."""
    vector = f"{site}.scale_out"
    if branch.norm_width is None:
        return Folding(vector, site)
    reader = _reader(site)
    if reader is None:
        return Folding(vector, None, _STAYS[_last_part(site)])
    return Folding(vector, reader)


def _last_part(path: str) -> str:
    return path.rpartition(".")[2]


class Folded(NamedTuple):
    """Weights of a model after folding."""

    weights: dict[str, Tensor]  #: weights other than scale vectors, by name in the state dict
    norms: dict[str, Tensor | None]  #: path of each RMSNorm -> gamma, or None for 1
    #: path of each branch with a normalized output -> the gamma after it, or None for 1; (d_head,)
    #: if all heads share it
    outputs: dict[str, Tensor | None]


@torch.no_grad()
def fold_weights(model: Backbone, *, into_norms: bool = False) -> Folded:
    """Fold the vectors of `foldable` into new tensors of the model's dtype.

    With `into_norms` a shared input-side vector stays in its norm, as in standard models.
    """
    _expect_backbone(model)
    weights = _plain_weights(model)
    gammas: dict[str, Tensor | None] = {}
    kept: set[ScaleVector | None] = set()
    for path, module in model.named_modules():
        if isinstance(module, RMSNorm) and path not in gammas:
            gammas[path] = None if module.scale is None else module.scale()
        if not isinstance(module, BranchGroup):
            continue
        if into_norms:
            kept.add(module.norm.scale)
        else:
            gammas[f"{path}.norm"] = None  # before the norm itself comes
    _fold_inputs(model, weights, kept)
    outputs = _fold_outputs(model, weights)
    return Folded(weights, gammas, outputs)


def _fold_inputs(
    model: Backbone, weights: dict[str, Tensor], kept: Set[ScaleVector | None]
) -> None:
    """Fold the vectors before matrices into these, except those that norms keep."""
    for path, _, (scale_in, _) in scaled_linears(model):
        if scale_in is None or scale_in in kept:
            continue
        weight = weights[f"{path}.weight"]  # (*batch_dims, d_out, d_in)
        weight *= scale_in().unsqueeze(-2)  # (*batch_dims, 1, d_in)


def _fold_outputs(model: Backbone, weights: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """Fold the vectors after matrices; return those after norms as in `Folded.outputs`."""
    outputs: dict[str, Tensor | None] = {}
    for path, branch, (_, scale_out) in scaled_linears(model):
        if branch.norm_width is not None:
            outputs[path] = _fold_behind_norm(path, branch.norm_width, scale_out, weights)
        elif scale_out is not None:
            weight = weights[f"{path}.weight"]  # (*batch_dims, d_out, d_in)
            weight *= scale_out().unsqueeze(-1)  # (*batch_dims, d_out, 1)
    return outputs


def _plain_weights(model: Backbone) -> dict[str, Tensor]:
    """Return copies of the weights other than scale vectors."""
    vectors = []
    for path, module in model.named_modules():
        if isinstance(module, ScaleVector):
            vectors.append(f"{path}.")
    weights = {}
    for name, value in model.state_dict().items():
        if not name.startswith(tuple(vectors)):
            weights[name] = value.clone()
    return weights


def _fold_behind_norm(
    path: str, width: int, scale: ScaleVector | None, weights: dict[str, Tensor]
) -> Tensor | None:
    """Fold the vector after a normalized output into the next matrix; return it if it stays."""
    if scale is None:
        return None
    reader = _reader(path)
    if reader is None:
        return stored_gamma(scale)
    gamma = scale()
    columns = weights[f"{reader}.weight"]
    # grouped-query attention: several query heads share a head of v
    shared = columns.shape[-1] // gamma.shape[-1]
    heads = gamma.unflatten(-1, (-1, width))  # (*batch_dims, heads, width)
    columns *= heads.repeat_interleave(shared, dim=-2).flatten(-2).unsqueeze(-2)
    return None


def stored_gamma(vector: ScaleVector) -> Tensor:
    """Return gamma, (d_head,) if all heads share it."""
    return _of_one_head(vector)()


def _of_one_head(vector: ScaleVector) -> ScaleVector:
    """Return the vector of each head, (d_head,), if all heads share it; otherwise the vector."""
    if isinstance(vector, HeadShared):
        return vector.vector
    return vector


@torch.no_grad()
def fold(model: Backbone) -> Backbone:
    """Return a backbone with the same logits and as few scale vectors as possible.

    Without `dnp`, Q/K-norm and Post-Norm the result is `nop`: scale vectors around a matrix add no
    expressivity. With them, norms and the remaining vectors of `foldable` are kept, as exceptions
    of `placement_at`.

    Args:
        model: backbone with any strategy; it is not changed
    """
    weights, norms, outputs = fold_weights(model)
    alone = [path for path, _ in output_norms(model)]
    strategy = "nop"
    placements: dict[str, str] = {}
    if alone:  # these norms have vectors if the strategy has any, so all branches are exceptions
        strategy = "llama"
        placements = dict.fromkeys(_branch_names(model), "nop")
    options = _options_of_outputs(model, outputs, placements)
    folded = meta_backbone(model.config, strategy, options)
    folded.to(model.embed.weight.dtype).to_empty(device=model.embed.weight.device)
    folded.load_state_dict(weights, strict=False)
    for path in alone:
        _set_gamma(folded.get_submodule(path).scale, norms[path])
    for path, gamma in outputs.items():
        _set_gamma(folded.get_submodule(path).scale_out, gamma)
    return folded


def _branch_names(model: Backbone) -> list[str]:
    names: set[str] = set()
    for module in model.modules():
        if isinstance(module, BranchGroup):
            names.update(module.names)
    return sorted(names)


def _options_of_outputs(
    model: Backbone, outputs: Mapping[str, Tensor | None], placements: Mapping[str, str]
) -> ScaleOptions:
    """Return the exceptions for branches with normalized outputs, next to other placements."""
    placement_at = dict(placements)
    share_heads = set()
    for path, gamma in outputs.items():
        name = _last_part(path)
        if gamma is None:
            placement_at[name] = "np"
            continue
        placement_at[name] = "anp"
        if isinstance(model.get_submodule(path).scale_out, HeadShared):
            share_heads.add(name)
    return ScaleOptions(placement_at=placement_at, share_heads=sorted(share_heads))


def _set_gamma(vector: Any, gamma: Tensor | None) -> None:
    """Set gamma in a folded model, (d_head,) if all heads share it; None for no vector."""
    if gamma is not None:
        _of_one_head(vector).set_gamma(gamma)


def _reader(branch: str) -> str | None:
    group, _, name = branch.rpartition(".")
    if name not in _READERS:
        return None
    return f"{group.rpartition('.')[0]}.{_READERS[name]}"


def _expect_backbone(model: object) -> None:
    hint = "After apply_strategy, call fold_applied and then the model's own save_pretrained."
    expect(isinstance(model, Backbone), "model", type(model).__name__, f"a Backbone. {hint}")
