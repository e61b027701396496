"""The language-model head: the final norm and lm_head, up to logits or up to the loss."""

from torch import Tensor

from lightning_sv.nn.cross_entropy import linear_cross_entropy
from lightning_sv.scale import BranchGroup, ScaledLinear


class Head(BranchGroup):
    """The norm and its one branch, lm_head; gives the loss as well, without keeping logits."""

    lm_head: ScaledLinear

    def forward(self, x: Tensor, targets: Tensor | None = None) -> tuple[Tensor]:
        """(B, T, d) -> the logits, (B, T, vocab_size); with `targets`, (B, T), their mean loss in nats, a scalar."""
        if targets is None:
            return (self.branch("lm_head", self.norm(x)),)
        branch = self.lm_head
        gamma_in, gamma_out = (None if v is None else v() for v in (branch.scale_in, branch.scale_out))
        eps = None if branch.norm_width is None else branch.eps
        return (linear_cross_entropy(self.norm(x), branch.weight, targets, gamma_in, gamma_out, eps),)
