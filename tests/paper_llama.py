"""A Llama with scale vectors, written from the paper's equations: the oracle of several folders."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sv import Backbone


class PaperLlama(nn.Module):
    """A Llama with scale vectors, written from the paper's equations (Section 3) on plain tensors.

    y = gamma_a * Norm(W (gamma_b * Norm(x))): which factors a branch has is read from the
    parameters that there are.
    """

    def __init__(self, model: Backbone):
        super().__init__()
        self.config = model.config
        self.normalizes = model.strategy.placement == "dnp"
        self.er = model.strategy.parameterization == "er"
        for name, parameter in model.named_parameters():
            self.register_parameter(
                name.replace(".", "/"), nn.Parameter(parameter.detach().clone())
            )

    def gamma(self, path: str) -> Tensor | float:
        """Direct: gamma; offset: 1 + w; OR: beta Norm(alpha); ER: exp(beta) exp(alpha - mean
        alpha); or 1."""
        own = {
            name.rpartition("/")[2]: p
            for name, p in self.named_parameters()
            if name.startswith(path + "/")
        }
        if "offset" in own:
            return 1 + own["offset"]
        if not own or "gamma" in own:
            return own.get("gamma", 1.0)
        alpha = own["alpha"]
        beta = own["beta"]
        if self.er:
            return beta.exp() * (alpha - alpha.mean()).exp()
        return beta * alpha * len(alpha) ** 0.5 / alpha.norm()

    def norm(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.config.norm_eps).sqrt()

    def matrix(self, x: Tensor, path: str, heads: int = 0) -> Tensor:
        """W with its vectors; under dnp, `heads` parts of its output are normalized."""
        y = (x * self.gamma(f"{path}/scale_in")) @ getattr(self, f"{path}/weight").T
        if self.normalizes and heads:
            y = self.norm(y.unflatten(-1, (heads, -1))).flatten(-2)
        return y * self.gamma(f"{path}/scale_out")

    def branch(self, x: Tensor, group: str, name: str, heads: int = 1) -> Tensor:
        return self.matrix(
            self.norm(x) * self.gamma(f"{group}/norm/scale"), f"{group}/{name}", heads
        )

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        n = self.config.n_head
        t = input_ids.shape[1]
        x = getattr(self, "embed/weight")[input_ids]
        width = x.shape[-1] // n
        frequencies = self.config.rope_theta ** (-torch.arange(0, width, 2, dtype=x.dtype) / width)
        angles = torch.outer(torch.arange(t, dtype=x.dtype), frequencies)  # t, width / 2
        turn = torch.polar(torch.ones_like(angles), angles)
        mask = torch.full((t, t), -torch.inf, dtype=x.dtype).triu(1)
        for i in range(self.config.n_layer):
            attn = f"layers/{i}/attn"
            ffn = f"layers/{i}/ffn"
            q, k, v = (
                self.branch(x, f"{attn}/qkv", name, n).unflatten(-1, (n, width)).transpose(1, 2)
                for name in ("q_proj", "k_proj", "v_proj")
            )
            q, k = (self.rotate(z, turn) for z in (q, k))
            scores = (q @ k.mT / width**0.5 + mask).softmax(-1)
            x = x + self.matrix((scores @ v).transpose(1, 2).flatten(-2), f"{attn}/o_proj")
            gate, up = (self.branch(x, f"{ffn}/gate_up", name) for name in ("gate_proj", "up_proj"))
            x = x + self.matrix(F.silu(gate) * up, f"{ffn}/down_proj")
        return SimpleNamespace(logits=self.branch(x, "head", "lm_head"))

    @staticmethod
    def rotate(z: Tensor, turn: Tensor) -> Tensor:
        """RoPE on pairs (i, i + width / 2), as complex numbers."""
        real, imaginary = z.chunk(2, -1)
        turned = torch.complex(real, imaginary) * turn
        return torch.cat([turned.real, turned.imag], -1)
