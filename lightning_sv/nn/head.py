"""Language-model head: the final norm and lm_head, with the loss."""

from torch import Tensor

from lightning_sv.nn.cross_entropy import linear_cross_entropy
from lightning_sv.scale import BranchGroup, ScaledLinear


class Head(BranchGroup):
    """The final norm and its only branch, lm_head; computes the loss without storing all logits."""

    lm_head: ScaledLinear

    def forward(self, x: Tensor, targets: Tensor | None = None) -> tuple[Tensor]:
        """Return the logits (B, T, vocab_size); with `targets` (B, T), their mean loss in nats, a scalar."""
        if targets is None:
            return (self.branch("lm_head", self.norm(x)),)
        branch = self.lm_head
        gamma_in, gamma_out = (None if v is None else v() for v in (branch.scale_in, branch.scale_out))
        eps = None if branch.norm_width is None else branch.eps
        return (linear_cross_entropy(self.norm(x), branch.weight, targets, gamma_in, gamma_out, eps),)
