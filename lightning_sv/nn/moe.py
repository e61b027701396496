"""LlamaMoE's feed-forward network: a router, sparse SwiGLU experts, and a shared expert.

The widths are Qwen-MoE's (paper, Appendix B.1). Routing and balancing are our interpretation, see
`RouterConfig`. Every linear map of the block's normalized input is a branch: under `hg` the router
and each expert's gate and up have their own scale vectors, and a placement with an output side also
scales the router's logits (`scale_options.placement_at` can disable that). No token is dropped.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sv.nn.config import BackboneConfig
from lightning_sv.nn.dispatch import combine, dispatch, layout, weights_by_row
from lightning_sv.scale import Branch, ScaleBuilder
from lightning_sv.scale.fast import swiglu
from lightning_sv.scale.shapes import Float, Int

# B batch, T positions, D d_model, N = B T tokens, E experts, k active experts, R rows of the
# dispatch buffer.


class Routing(NamedTuple):
    """Routing statistics of one block and micro-batch.

    Attributes:
        load: (E,) tokens per expert; the sum is k N, because no token is dropped
        total: load over all devices, used by the balance loss; equal to load until it is reduced
        probability: (E,) mean probability of each expert
        logits: (N, E) logits of the router; `z_loss` and `entropy` are computed from them on demand
    """

    load: Tensor
    total: Tensor
    probability: Tensor
    logits: Tensor

    @property
    def balance_loss(self) -> Tensor:
        """E sum_e f_e P_e: 1 when balanced, E / k when all tokens use the same k experts.

        Switch Transformer, arXiv:2101.03961, eq. 4.
        f is an expert's fraction of the assignments of all devices, P its mean probability on this
        device. f has no gradient, so the mean over devices is the loss of the combined batch
        (arXiv:2501.11873).
        """
        return len(self.total) * (self.total / self.total.sum() * self.probability).sum()

    @property
    def z_loss(self) -> Tensor:
        """Mean squared log-sum-exp of the logits (arXiv:2202.08906, eq. 5)."""
        return self.logits.logsumexp(-1).square().mean()

    @property
    def entropy(self) -> Tensor:
        """Mean entropy of the router's probabilities in nats; log E if they are uniform."""
        return torch.special.entr(self.logits.softmax(-1)).sum(-1).mean()

    def detach(self) -> "Routing":
        """Return the routing without its graph, for logging."""
        return Routing(*(value.detach() for value in self))


class MixtureOfExperts(nn.Module):
    """y = shared(x) + sum over the k selected experts of weight_e(x) expert_e(x).

    The weights are the router's softmax over all experts at the k largest, divided by their sum
    if `router.renormalize` is on.

    Args:
        config: sizes and routing options
        build: builder of the norm and the branches
    """

    router_bias: Tensor

    def __init__(self, config: BackboneConfig, build: ScaleBuilder):
        super().__init__()
        d = config.d_model
        self.n_expert = config.n_expert
        self.n_active = config.n_expert_active
        self.router = config.router
        self.expert_down_proj = build.linear(
            "expert_down_proj", config.expert_width, d, (self.n_expert,)
        )
        self.has_shared = config.n_expert_shared > 0
        if self.has_shared:
            self.shared_down_proj = build.linear("shared_down_proj", config.ffn_width, d)
        self.inputs = build.group("ffn_norm", d, self._branches(config))
        if self.router.balance == "bias":
            self.register_buffer("router_bias", torch.zeros(self.n_expert))

    def _branches(self, config: BackboneConfig) -> dict[str, Branch]:
        """Return every linear map of the block's normalized input."""
        d_expert = config.expert_width
        expert = Branch(d_expert, dnp_width=d_expert, batch_dims=(self.n_expert,))
        # The router is never normalized, because that would fix the spread of its logits.
        branches = {
            "router": Branch(self.n_expert, dnp_width=None, role="router"),
            "expert_gate_proj": expert,
            "expert_up_proj": expert,
        }
        if self.has_shared:
            shared = Branch(config.ffn_width, dnp_width=config.ffn_width)
            branches["shared_gate_proj"] = shared
            branches["shared_up_proj"] = shared
            if self.router.gate_shared:
                branches["shared_router"] = Branch(1, dnp_width=None, role="router")
        return branches

    def forward(self, x: Float[Tensor, "B T D"]) -> tuple[Float[Tensor, "B T D"], Routing]:
        """(B, T, D) -> (B, T, D) and the routing; x is the residual stream before the norm."""
        xhat = self.inputs.norm(x).flatten(0, 1)  # N D
        weights, experts, routing = self._route(xhat)
        out = self._run_experts(xhat, weights, experts)  # N D
        if self.has_shared:
            out = out + self._run_shared(xhat)
        return out.view_as(x), routing

    def _run_experts(
        self,
        xhat: Float[Tensor, "N D"],
        weights: Float[Tensor, "N {self.n_active}"],
        experts: Int[Tensor, "N {self.n_active}"],
    ) -> Float[Tensor, "N D"]:
        places = layout(experts, self.n_expert)
        buffer = dispatch(xhat, places)  # R D
        gate = self.inputs.branch("expert_gate_proj", buffer, places.rows)  # R d_expert
        up = self.inputs.branch("expert_up_proj", buffer, places.rows)
        # down is linear: with the weights applied before it, its output is not saved for their
        # gradient.
        hidden = swiglu(gate, up, weights_by_row(weights, places))
        return combine(self.expert_down_proj(hidden, rows=places.rows), places)

    def _run_shared(self, xhat: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        gate = self.inputs.branch("shared_gate_proj", xhat)  # N d_ff
        up = self.inputs.branch("shared_up_proj", xhat)
        out: Tensor = self.shared_down_proj(F.silu(gate) * up)
        if self.router.gate_shared:
            out = out * self.inputs.branch("shared_router", xhat).sigmoid()
        return out

    def _route(
        self, xhat: Float[Tensor, "N D"]
    ) -> tuple[Float[Tensor, "N {self.n_active}"], Int[Tensor, "N {self.n_active}"], Routing]:
        """Return weights (N, k), experts (N, k) and the statistics."""
        # Use float32 under autocast too: ties between bf16 logits would change the selection.
        with torch.autocast(xhat.device.type, enabled=False):
            router: Any = self.inputs.router
            logits = self.inputs.branch("router", xhat.to(router.weight.dtype))  # N E
            at_least_float32 = torch.promote_types(logits.dtype, torch.float32)
            logits = logits.to(at_least_float32)
            probabilities = logits.softmax(-1)
            experts = self._choose(probabilities)
            weights = probabilities.gather(-1, experts)
            if self.router.renormalize:
                weights = weights / weights.sum(-1, keepdim=True)

            ones = torch.ones_like(weights).flatten()
            load = torch.zeros_like(probabilities[0]).index_add_(0, experts.flatten(), ones)
            routing = Routing(load, total=load, probability=probabilities.mean(0), logits=logits)
            return weights, experts, routing

    def _choose(self, probabilities: Float[Tensor, "N E"]) -> Int[Tensor, "N {self.n_active}"]:
        """(N, E) -> (N, k) experts; the bias of loss-free balancing affects nothing but this."""
        if self.router.balance == "bias":
            probabilities = probabilities + self.router_bias
        return probabilities.topk(self.n_active, dim=-1).indices

    @torch.no_grad()
    def move_bias(self, load: Tensor) -> None:
        """Update the bias after a step: bias += rate sign(mean load - load) (arXiv:2408.15664).

        `load` (E,) has the tokens of each expert in the global batch.
        """
        if self.router.balance == "bias":
            self.router_bias.add_((load.mean() - load).sign(), alpha=self.router.bias_rate)


def router_loss(routings: list[Routing], config: BackboneConfig) -> Tensor | float:
    """Return the routers' part of the training loss, mean over the blocks; 0 for a dense model."""
    if not routings:
        return 0.0
    router = config.router
    total = torch.zeros(())
    if router.balance == "loss":
        balance = torch.stack([routing.balance_loss for routing in routings])
        total = total + router.balance_coef * balance.mean()
    if router.z_coef > 0:
        z_losses = torch.stack([routing.z_loss for routing in routings])
        total = total + router.z_coef * z_losses.mean()
    return total
