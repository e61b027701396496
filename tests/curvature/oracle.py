"""The dense Hessian of a Llama written out in plain operations, and its blocks."""

import functools
from collections.abc import Callable, Sequence
from unittest import mock

import torch
from torch import Tensor, nn

from lightning_sv import Backbone, BackboneConfig, ScaleStrategy
from lightning_sv.nn import next_token_loss
from lightning_sv.nn.rope import rope_tables
from lightning_sv.scale import BranchGroup, ScaledLinear, ScaleVector
from lightning_sv.scale.strategy import PARAMETERIZATIONS
from tests.conftest import perturbed, thinned

CONFIG = BackboneConfig(d_model=8, n_layer=2, n_head=2, vocab_size=12, d_ff=10)
STRATEGIES = [f"{sides}+{name}" for sides in ("bp", "hg+dp", "hg+dnp") for name in PARAMETERIZATIONS]
#: of `make test`: both sides, a norm of the output, every derivative of a parameterization but Gemma's
FEW = ("bp+direct", "hg+dp+er", "hg+dnp+or")
SUBSETS = ("all", "input", "output", "branch", "layer")
CASES = [(s, b) for s in STRATEGIES for b in SUBSETS if ScaleStrategy.parse(s).placement_row.scale_out or b != "output"]
STRATEGY_ROWS = thinned(STRATEGIES, FEW)


class Plain(nn.Module):
    """Return the loss of a Backbone without fused products, custom backward passes, or SDPA."""

    def __init__(self, model: Backbone):
        super().__init__()
        self.model = model

    def branches(self, group: BranchGroup, x: Tensor) -> list[Tensor]:
        xhat, out = self.norm(x), []
        for name, branch in group.branches():
            gamma_in, gamma_out = group.gammas(name)
            y = (xhat if gamma_in is None else xhat * gamma_in) @ branch.weight.T
            if branch.norm_width is not None:
                y = self.norm(y.unflatten(-1, (-1, branch.norm_width))).flatten(-2)
            out.append(y if gamma_out is None else y * gamma_out)
        return out

    @staticmethod
    def norm(x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + CONFIG.norm_eps).sqrt()

    @staticmethod
    def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        (a, b), (cos, sin) = x.chunk(2, -1), rope
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def forward(self, tokens: Tensor) -> Tensor:
        model, inputs = self.model, tokens[:, :-1]
        x = model.embed(inputs)
        length = inputs.shape[1]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        for layer in model.layers:
            q, k, v = (y.unflatten(-1, (CONFIG.n_head, -1)) for y in self.branches(layer.attn.qkv, x))
            rope = rope_tables(length, CONFIG.head_width, CONFIG.rope_theta, like=x)
            q, k, v = (y.transpose(1, 2) for y in (self.rotate(q, rope), self.rotate(k, rope), v))
            scores = q @ k.mT / CONFIG.head_width**0.5
            y = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
            x = x + layer.attn.o_proj(y.transpose(1, 2).flatten(2))
            gate, up = self.branches(layer.ffn.gate_up, x)
            x = x + layer.ffn.down_proj(gate * gate.sigmoid() * up)
        (logits,) = self.branches(model.head, x)
        log_p = logits.log_softmax(-1).gather(-1, tokens[:, 1:].unsqueeze(-1))
        return -log_p.mean()


class Case:
    """A model off its initialization, its loss through SDPA, and the dense Hessian of `Plain`."""

    def __init__(self, strategy: str):
        torch.manual_seed(1)
        # Backbone sets the weights itself; what branches draw first would only move the case, and bounds of three
        # standard errors do not hold for one draw in some hundreds.
        with mock.patch.object(ScaledLinear, "reset_parameters"):
            model = Backbone(CONFIG, strategy)
        self.model = perturbed(model).double()
        self.tokens = torch.randint(0, CONFIG.vocab_size, (2, 10))
        plain = Plain(self.model)
        names = [name for name, _ in plain.named_parameters()]
        sizes = [p.numel() for p in plain.parameters()]
        shapes = [p.shape for p in plain.parameters()]

        def loss_of(flat: Tensor) -> Tensor:
            parts = [x.view(shape) for x, shape in zip(flat.split(sizes), shapes, strict=True)]
            value: Tensor = torch.func.functional_call(plain, dict(zip(names, parts, strict=True)), (self.tokens,))
            return value

        flat = torch.cat([p.detach().flatten() for p in plain.parameters()])
        self.plain_value = loss_of(flat)
        self.hessian = torch.func.hessian(loss_of)(flat)
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self._where = {id(p): range(s, s + n) for p, s, n in zip(plain.parameters(), starts, sizes, strict=True)}

    def loss(self) -> Tensor:
        return next_token_loss(self.model(self.tokens[:, :-1]), self.tokens[:, 1:])

    def subset(self, name: str) -> list[nn.Parameter]:
        model = self.model
        vectors = [m for m in model.modules() if isinstance(m, ScaleVector)]
        group: BranchGroup = model.layers[1].attn.qkv
        k = group.k_proj
        assert isinstance(k, ScaledLinear)
        owners = [m for m in (group.norm.scale, k.scale_in, k.scale_out) if m is not None]
        subsets: dict[str, Callable[[], list[nn.Parameter]]] = {
            "all": lambda: list(model.parameters()),
            "input": lambda: [p for m in vectors if m.role == "input" for p in m.parameters()],
            "output": lambda: [p for m in vectors if m.role == "output" for p in m.parameters()],
            "branch": lambda: [k.weight, *(p for m in owners for p in m.parameters())],
            "layer": lambda: list(model.layers[0].parameters()),
        }
        return subsets[name]()

    def dense(self, parameters: list[nn.Parameter]) -> Tensor:
        index = torch.tensor([i for p in parameters for i in self._where[id(p)]])
        return self.hessian[index][:, index]


case = functools.cache(Case)


class Dense:
    """A symmetric matrix as a product; its vectors are shaped as `like`, or split in two if possible."""

    def __init__(self, matrix: Tensor, like: Sequence[Tensor] | None = None):
        self.matrix = matrix
        halves = [n for n in (len(matrix) // 2, len(matrix) - len(matrix) // 2) if n]
        self.parameters = tuple(matrix[0].split(halves) if like is None else like)
        self.products = 0

    def __call__(self, vector: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.products += 1
        return split_like(self.matrix @ torch.cat([v.flatten() for v in vector]), self.parameters)


def split_like(flat: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor, ...]:
    parts = flat.split([p.numel() for p in parameters])
    return tuple(x.view_as(p) for x, p in zip(parts, parameters, strict=True))
