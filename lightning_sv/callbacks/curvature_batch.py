"""Steps, parameter subsets, batch size and model copy of curvature probes."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_sv.nn import Backbone, BackboneConfig, activated_parameters, flops_per_token, meta_backbone
from lightning_sv.optim import PARAMETER_ROLES, full_tensor, parameter_roles
from lightning_sv.scale import BranchGroup, RMSNorm, ScaledLinear, ScaleVector

#: subset -> its parameters; subsets of roles that a model lacks are empty
Subsets = dict[str, tuple[nn.Parameter, ...]]

# Costs in forward and backward passes over one sequence: the maximum over strategies in
# benchmarks/results/curvature.json. Products for scale vectors are cheaper than for all parameters.
GRAPH, PRODUCT, SCALE_PRODUCT = 1.49, 2.15, 1.71
#: Overhead of a product per block in FLOP, fitted to `unified` at d_model 64 on one CPU core.
OVERHEAD = 84e6
#: Fraction of the budget to plan for, because a small batch uses fewer cores than the training batch (`mini` on two
#: cores took 1.4 times the plan).
PLANNED = 0.6
#: Default limit on the tokens of a retained graph.
MOST_TOKENS = 4096
#: Default limit on the attention entries (blocks x heads x queries x keys) of a retained graph: math attention keeps
#: about six float32 copies of each, 18 GB in total.
MOST_ATTENTION = 750_000_000


def log_spaced(total: int, n: int) -> list[int]:
    """Return at most n steps: 0, and geometrically spaced steps from 1% of the run to its end.

    >>> log_spaced(1000, 5)
    [0, 10, 46, 215, 1000]
    """
    if n < 3:
        return [0, total]
    first = max(1.0, total / 100)
    return sorted({0, *(round(first * (total / first) ** (i / (n - 2))) for i in range(n - 1))})


def parameter_subsets(model: nn.Module) -> Subsets:
    """Return the trained parameters of `model` by role, layer and branch.

    all; matrix, router, head, embedding, scale_input, scale_output: by role; layer0, ...: one block;
    q_proj, ...: the weights of that name in every block, with their scale vectors;
    attn_norm, ...: the scale vectors of that norm.
    """
    always = ("all", *map(_role_name, PARAMETER_ROLES))
    subsets: dict[str, list[nn.Parameter]] = {name: [] for name in always}
    if isinstance(model, Backbone):
        for named in parameter_roles(model):
            subsets["all"].append(named.parameter)
            subsets[_role_name(named.role)].append(named.parameter)
    else:  # in a custom model, only scale vectors have a known role
        subsets["all"] = list(model.parameters())
        for module in model.modules():
            if isinstance(module, ScaleVector):
                subsets[_role_name(module.role)].extend(module.parameters())
    sites: dict[str, list[nn.Parameter]] = defaultdict(list)
    for path, module in model.named_modules():
        parts = path.split(".")
        members = list(module.parameters())
        if parts[0] == "layers" and len(parts) == 2:
            sites[f"layer{parts[1]}"] = members
        elif isinstance(module, ScaledLinear | nn.Linear) or (isinstance(module, RMSNorm) and parts[-1] != "norm"):
            sites[parts[-1]] += members
        elif isinstance(module, BranchGroup):
            sites[module.site] += module.norm.parameters()
            for name in module.names:
                sites[name] += (p for vector in module.vectors(name) if vector is not None for p in vector.parameters())
    subsets = subsets | sites | subsets  # 'router' keeps its meaning as a role
    trained = {
        name: tuple({id(p): p for p in members if p.requires_grad}.values()) for name, members in subsets.items()
    }
    return {name: members for name, members in trained.items() if members or name in always}


def _role_name(role: str) -> str:
    return f"scale_{role}" if role in ("input", "output") else role


def fitting_length(config: BackboneConfig, seq_len: int) -> int:
    """Return the tokens of a sequence used by an exact probe: all, or 1/2, 1/4, ... to limit memory.

    >>> fitting_length(BackboneConfig(d_model=1792, n_layer=22, n_head=28), 4096)
    1024
    """
    while config.n_layer * config.n_head * seq_len**2 > MOST_ATTENTION and seq_len > 1:
        seq_len //= 2
    return seq_len


def fitting_sequences(
    config: BackboneConfig, seq_len: int, work: float, probes: int, subsets: Sequence[str], products: int
) -> int:
    """Return the number of sequences per probe, from the run's plan only.

    It depends on neither strategy nor measured times, and includes subsets that a strategy lacks, so compared runs use
    the same batch. The overhead of a product, most of its cost in a small model, is an estimate. `work` is the budget
    of all probes of the run, in forward and backward passes over one sequence of `seq_len` probed tokens; `products`
    is the maximum per subset.
    """
    each = GRAPH + sum(products * (SCALE_PRODUCT if name.startswith("scale_") else PRODUCT) for name in subsets)
    flops = seq_len * flops_per_token(activated_parameters(meta_backbone(config), config), config, seq_len)
    n = PLANNED * work / probes / each - OVERHEAD * config.n_layer / flops
    attention = config.n_layer * config.n_head * seq_len**2
    return max(1, min(int(n), MOST_TOKENS // seq_len, MOST_ATTENTION // attention))


def plain_copy(source: nn.Module, meta: Backbone, device: torch.device, *, keep: bool) -> Backbone | None:
    """Build an eager float32 backbone with the current weights of `source`, which may be compiled or sharded.

    `meta` is a backbone of the same sizes and strategy without storage. Gathering sharded weights is a collective:
    call it on every rank; those with `keep=False` return None. No random numbers are sampled.
    """
    copy = meta.to_empty(device=device) if keep else None
    target: dict[str, Tensor] = {} if copy is None else copy.state_dict()
    for key, value in source.state_dict().items():
        full = full_tensor(value)
        if copy is not None:
            target.pop(key).copy_(full)
    assert not target
    return copy
