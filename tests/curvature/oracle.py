"""The dense Hessian of a Llama written from the paper's equations, and its blocks."""

import functools
from collections.abc import Sequence
from unittest import mock

import torch
from torch import Tensor, nn

from lightning_sv import Backbone, BackboneConfig, ScaleStrategy
from lightning_sv.nn import next_token_loss
from lightning_sv.scale import BranchGroup, ScaledLinear, ScaleVector
from lightning_sv.scale.strategy import PARAMETERIZATIONS
from tests.conftest import perturbed, thinned
from tests.paper_llama import ExponentialPaperLlama, PaperLlama

CONFIG = BackboneConfig(d_model=8, n_layer=2, n_head=2, vocab_size=12, d_ff=10)
STRATEGIES = [f"{sides}+{name}" for sides in ("bp", "hg+dp", "hg+dnp") for name in PARAMETERIZATIONS]
#: of `make test`: both sides, a norm of the output, every derivative of a parameterization but Gemma's
FEW = ("bp+direct", "hg+dp+er", "hg+dnp+or")
SUBSETS = ("all", "input", "output", "branch", "layer")
CASES = [(s, b) for s in STRATEGIES for b in SUBSETS if ScaleStrategy.parse(s).placement_row.scale_out or b != "output"]
STRATEGY_ROWS = thinned(STRATEGIES, FEW)


class Case:
    """A model off its initialization, its loss through SDPA, and the dense Hessian of `PaperLlama`."""

    def __init__(self, strategy: str):
        torch.manual_seed(1)
        # Backbone sets the weights itself; what branches draw first would only move the case, and bounds of three
        # standard errors do not hold for one draw in some hundreds.
        with mock.patch.object(ScaledLinear, "reset_parameters"):
            model = Backbone(CONFIG, strategy)
        self.model = perturbed(model).double()
        self.tokens = torch.randint(0, CONFIG.vocab_size, (2, 10))
        plain = (ExponentialPaperLlama if strategy.endswith("+er") else PaperLlama)(self.model)
        parameters = dict(plain.named_parameters())

        def loss_of(flat: Tensor) -> Tensor:
            parts = dict(zip(parameters, split_like(flat, tuple(parameters.values())), strict=True))
            logits = torch.func.functional_call(plain, parts, (self.tokens[:, :-1],)).logits
            return next_token_loss(logits, self.tokens[:, 1:])

        flat = torch.cat([p.detach().flatten() for p in parameters.values()])
        self.plain_value = loss_of(flat)
        self.hessian = torch.func.hessian(loss_of)(flat)
        places = torch.arange(len(flat)).split([p.numel() for p in parameters.values()])
        self._where = {id(p): place for p, place in zip(self.model.parameters(), places, strict=True)}

    def loss(self, model: Backbone | None = None) -> Tensor:
        return next_token_loss((model or self.model)(self.tokens[:, :-1]), self.tokens[:, 1:])

    def subset(self, name: str) -> list[nn.Parameter]:
        model = self.model
        vectors = [m for m in model.modules() if isinstance(m, ScaleVector)]
        group: BranchGroup = model.layers[1].attn.qkv
        owners = [vector for vector in group.vectors("k_proj") if vector is not None]
        subsets: dict[str, list[nn.Parameter]] = {
            "all": list(model.parameters()),
            "input": [p for m in vectors if m.role == "input" for p in m.parameters()],
            "output": [p for m in vectors if m.role == "output" for p in m.parameters()],
            "branch": [group.get_parameter("k_proj.weight"), *(p for m in owners for p in m.parameters())],
            "layer": list(model.layers[0].parameters()),
        }
        return subsets[name]

    def dense(self, parameters: list[nn.Parameter]) -> Tensor:
        index = torch.cat([self._where[id(p)] for p in parameters])
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
