"""Activated parameters and floating-point operations per token."""

from torch import nn

from lightning_sv.nn.config import BackboneConfig


def activated_parameters(model: nn.Module, config: BackboneConfig) -> int:
    """Count the parameters used per token: all, but only n_expert_active of n_expert experts."""
    total = 0
    for module in model.modules():
        sparse = config.n_expert > 0 and getattr(module, "batch_dims", ()) == (config.n_expert,)
        for parameter in module.parameters(recurse=False):
            n = parameter.numel()
            total += n // config.n_expert * config.n_expert_active if sparse else n
    return total


def flops_per_token(activated: int, config: BackboneConfig, seq_len: int) -> float:
    """Return the FLOPs of forward and backward per token: 6 N + 12 n_layer T (H K).

    N is the number of `activated_parameters` without the embedding (a lookup). Attention counts as full, not
    causal, as in appendix B of the PaLM paper (arXiv:2204.02311), with the number of query heads.
    """
    n = activated - config.vocab_size * config.d_model
    return 6.0 * n + 12.0 * config.n_layer * seq_len * config.n_head * config.head_width
