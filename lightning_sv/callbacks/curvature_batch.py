"""Where curvature is probed: at which steps, in which parameters, on how many sequences, on which copy."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_sv.nn import Backbone, BackboneConfig, activated_parameters, flops_per_token, meta_backbone
from lightning_sv.optim import PARAMETER_ROLES, full_tensor, parameter_roles
from lightning_sv.scale import BranchGroup, RMSNorm, ScaledLinear, ScaleVector

#: subset -> the parameters it holds; those of a role that a model lacks are empty
Subsets = dict[str, tuple[nn.Parameter, ...]]

# Costs in forward and backward passes over one sequence, the largest over strategies in
# benchmarks/results/curvature.json; scale vectors alone are cheaper than all parameters.
GRAPH, PRODUCT, SCALE_PRODUCT = 1.49, 2.15, 1.71
#: what a product costs a block on top of its work, in FLOP: fitted to `unified` at d_model 64 on one core of a CPU
OVERHEAD = 84e6
#: share of the budget that is planned for: a small batch keeps fewer cores busy than the training's does (`mini` on
#: two cores took 1.4 times the plan)
PLANNED = 0.6
#: the retained graph of this many tokens is the largest that is taken unasked
MOST_TOKENS = 4096
#: and of this many entries of attention (blocks x heads x queries x keys): math attention keeps some six float32 copies
#: of each, 18 GB in all
MOST_ATTENTION = 750_000_000


def log_spaced(total: int, n: int) -> list[int]:
    """Return at most n steps: 0, and from 1% of the run to its end in equal ratios.

    >>> log_spaced(1000, 5)
    [0, 10, 46, 215, 1000]
    """
    if n < 3:
        return [0, total]
    first = max(1.0, total / 100)
    return sorted({0, *(round(first * (total / first) ** (i / (n - 2))) for i in range(n - 1))})


def parameter_subsets(model: nn.Module) -> Subsets:
    """Name the trained parameters of `model` by what they are and where.

    all; matrix, router, head, embedding, scale_input, scale_output: by role; layer0, ...: one block;
    q_proj, ...: the weights of that name in every block, with the scale vectors that act on them;
    attn_norm, ...: the vectors of that norm.
    """
    always = ("all", *map(_role_name, PARAMETER_ROLES))
    found: dict[str, list[nn.Parameter]] = {name: [] for name in always}
    if isinstance(model, Backbone):
        for named in parameter_roles(model):
            found["all"].append(named.parameter)
            found[_role_name(named.role)].append(named.parameter)
    else:  # of a model of the user's the scale vectors alone have a known role
        found["all"] = list(model.parameters())
        for module in model.modules():
            if isinstance(module, ScaleVector):
                found[_role_name(module.role)].extend(module.parameters())
    sites: dict[str, list[nn.Parameter]] = {}
    for path, module in model.named_modules():
        parts = path.split(".")
        own = list(module.parameters())
        if parts[0] == "layers" and len(parts) == 2:
            sites[f"layer{parts[1]}"] = own
        elif isinstance(module, ScaledLinear | nn.Linear) or (isinstance(module, RMSNorm) and parts[-1] != "norm"):
            sites.setdefault(parts[-1], []).extend(own)
        elif isinstance(module, BranchGroup):
            sites.setdefault(module.site, []).extend(module.norm.parameters())
            for name in module.names:
                acting = (p for vector in module.vectors(name) if vector is not None for p in vector.parameters())
                sites.setdefault(name, []).extend(acting)
    found |= {name: members for name, members in sites.items() if name not in found}  # router is the role
    trained = {name: tuple({id(p): p for p in members if p.requires_grad}.values()) for name, members in found.items()}
    return {name: members for name, members in trained.items() if members or name in always}


def _role_name(role: str) -> str:
    return f"scale_{role}" if role in ("input", "output") else role


def fitting_length(config: BackboneConfig, seq_len: int) -> int:
    """How many tokens of a sequence an exact probe reads: all, or a half, a quarter, ..., as memory grows with T^2.

    >>> fitting_length(BackboneConfig(d_model=1792, n_layer=22, n_head=28), 4096)
    1024
    """
    while config.n_layer * config.n_head * seq_len**2 > MOST_ATTENTION and seq_len > 1:
        seq_len //= 2
    return seq_len


def fitting_sequences(
    config: BackboneConfig, seq_len: int, work: float, probes: int, subsets: Sequence[str], products: int
) -> int:
    """How many sequences a probe can have, from the run's plan alone: compared runs have the same batch.

    Neither strategy nor measured time enters, and subsets that a strategy lacks count. What a product
    costs beyond its work, which is most of it in a small model, is an estimate.

    Args:
        config: sizes of the backbone
        seq_len: tokens a sequence, as probed
        work: what all probes may cost, in forward and backward passes over one sequence
        probes: in the run
        subsets: of a probe
        products: of a subset, at most
    """
    each = GRAPH + sum(products * (SCALE_PRODUCT if name.startswith("scale_") else PRODUCT) for name in subsets)
    flops = seq_len * flops_per_token(activated_parameters(meta_backbone(config), config), config, seq_len)
    n = PLANNED * work / probes / each - OVERHEAD * config.n_layer / flops
    attention = config.n_layer * config.n_head * seq_len**2
    return max(1, min(int(n), MOST_TOKENS // seq_len, MOST_ATTENTION // attention))


def plain_copy(source: nn.Module, meta: Backbone, device: torch.device, *, keep: bool) -> Backbone | None:
    """Build an eager float32 backbone with the present weights of `source`, compiled or sharded as that may be.

    Gathering sharded weights is a collective: call it on every rank. No random number is drawn.

    Args:
        source: the backbone that trains
        meta: backbone of the same sizes and strategy, without storage
        device: of the copy
        keep: whether this rank wants it; None is returned elsewhere
    """
    copy = meta.to_empty(device=device) if keep else None
    target: Mapping[str, Tensor] = {} if copy is None else copy.state_dict()
    state = source.state_dict()
    assert copy is None or state.keys() == target.keys()
    with torch.no_grad():
        for key, value in state.items():
            whole = full_tensor(value)
            if copy is not None:
                target[key].copy_(whole)
    return copy
