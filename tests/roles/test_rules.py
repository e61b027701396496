"""The table of rules: an example per row, and the page that explains how a traced pass becomes a
role."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sv.roles import weight_decay_roles
from lightning_sv.roles.classify import RULES, first_rule, uses_of_parameters
from lightning_sv.roles.dataflow import Dataflow
from lightning_sv.roles.trace import trace

ROOT = Path(__file__).parent.parent.parent
SECTION = (ROOT / "docs/architecture.md").read_text().partition("## How roles are found")[2]

#: row -> shape and role of a parameter p, what is computed of it, of data x (2, 5, 4) and of
#: learned queries q (3, 4), and the rows that decide p's uses, each once
EXAMPLES: dict[str, tuple[tuple[int, ...], str, Callable[[Tensor, Tensor, Tensor], Tensor], list[str]]] = {
    "learned queries' bias": ((4,), "bias", lambda p, x, q: (x @ torch.addmm(p, q, torch.ones(4, 4)).T).relu(), [
        "learned queries' bias"]),
    "parameters alone": ((4, 4), "matrix", lambda p, x, q: (x @ p.tanh()).relu(), ["parameters alone", "matrix"]),
    "lookup": ((9, 4), "embedding", lambda p, x, q: F.embedding(x.argsort(-1), p).relu(), ["lookup"]),
    "chosen rows": ((9, 4), "embedding", lambda p, x, q: p[x.argsort(-1)].relu(), ["chosen rows"]),
    "added table": ((9, 4), "embedding", lambda p, x, q: (x + p[:5]).relu(), ["parameters alone", "added table"]),
    "router": ((4, 4), "router", lambda p, x, q: (x @ p).softmax(-1).topk(2).values, ["router"]),
    "head": ((4, 4), "head", lambda p, x, q: x @ p, ["head"]),
    "matrix": ((4, 4), "matrix", lambda p, x, q: (x @ p).relu(), ["matrix"]),
    "summand of a scale vector": ((4,), "output", lambda p, x, q: (p + x.tanh()) * F.rms_norm(x, (4,)), [
        "summand of a scale vector"]),
    "bias": ((4,), "bias", lambda p, x, q: (x + p).relu(), ["bias"]),
    "scale vector": ((4,), "output", lambda p, x, q: p * x / x.square().mean(-1, keepdim=True).sqrt(), [
        "scale vector"]),
    "norm's statistics": ((4,), "output", lambda p, x, q: F.layer_norm(x, (4,), p), [
        "scale vector", "norm's statistics"]),
    "factor": ((4,), "multiplier", lambda p, x, q: x * p, ["factor"]),
    "attention's mask": ((5, 5), "bias", lambda p, x, q: _attention(x, x, x, p[None, None]), [
        "parameters alone", "attention's mask"]),
    "argument of attention": ((2, 1, 5, 4), "other", lambda p, x, q: _attention(p, x, x, None), [
        "argument of attention"]),
    "single factor": ((1,), "other", lambda p, x, q: x * p, ["single factor"]),
    "joined": ((2, 1, 4), "other", lambda p, x, q: torch.cat([p, x], 1), ["joined"]),
    "elementwise": ((4,), "other", lambda p, x, q: torch.atan2(x, p), ["elementwise"]),
}  # fmt: skip


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    query, key, value = (each if each.ndim == 4 else each[:, None] for each in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, mask)


class Example(nn.Module):
    """Parameters p and q, and a function of them and of data."""

    def __init__(
        self, shape: tuple[int, ...], computed: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.rand(shape), requires_grad=False)
        self.q = nn.Parameter(torch.rand(3, 4), requires_grad=False)
        self.computed = computed

    def forward(self, x: Tensor) -> Tensor:
        return self.computed(self.p, x, self.q)


@pytest.mark.parametrize("name", EXAMPLES)
def test_rules_each_row_decides_its_example(name: str) -> None:
    shape, role, computed, rows = EXAMPLES[name]
    model = Example(shape, computed)
    x = torch.rand(2, 5, 4)
    flow = Dataflow(trace(model, (x,), {}))
    uses = [use for use in uses_of_parameters(flow) if "p" in flow.sources[use.value]]
    rules = [first_rule(use) for use in uses]
    assert name in rows
    assert list(dict.fromkeys(rule and rule.name for rule in rules)) == rows
    assert weight_decay_roles(model, x)["p"].role == role


#: operation in a table of `ops` that no family's row and no other example needs -> as in `EXAMPLES`
OPERATIONS: dict[str, tuple[tuple[int, ...], str, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "native_batch_norm": (
        (5,),
        "output",
        lambda p, x, q: F.batch_norm(x, None, None, p, training=True),
    ),
    "native_group_norm": ((5,), "output", lambda p, x, q: F.group_norm(x, 5, p)),
    "kthvalue": (
        (4, 4),
        "router",
        lambda p, x, q: ((s := x @ p) >= s.kthvalue(2, -1, True).values) * x,
    ),
    "nll_loss_forward": (
        (4, 4),
        "head",
        lambda p, x, q: F.cross_entropy((x @ p)[0], x[0].argsort(-1)[:, 0]),
    ),
    "baddbmm": ((2, 4, 4), "matrix", lambda p, x, q: torch.baddbmm(x[:, :1], x, p).relu()),
    "copy": (
        (4,),
        "input",
        lambda p, x, q: (torch.zeros_like(x).copy_(F.rms_norm(x, (4,), p)) @ q.T).relu(),
    ),
}


@pytest.mark.parametrize("op", OPERATIONS)
def test_operations_role_of_their_parameter_is_known(op: str) -> None:
    shape, role, computed = OPERATIONS[op]
    model = Example(shape, computed)
    x = torch.rand(2, 5, 4)
    assert op in {node.op for node in trace(model, (x,), {}).nodes}
    assert weight_decay_roles(model, x)["p"].role == role


#: how one number p is used -> its role, and what is computed of p and data x: it scales all
#: channels alike
NUMBERS: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "after a norm": ("other", lambda p, x: p * F.rms_norm(x, (4,))),
    "within a norm": ("other", lambda p, x: p * x * x.square().mean(-1, keepdim=True).rsqrt()),
    "before a norm": ("other", lambda p, x: F.rms_norm(p * x, (4,))),
}


@pytest.mark.parametrize("use", NUMBERS)
def test_factor_of_one_entry_is_no_scale_vector(use: str) -> None:
    role, computed = NUMBERS[use]
    model = Example((1,), lambda p, x, q: computed(p, x))
    assert weight_decay_roles(model, torch.rand(2, 5, 4))["p"].role == role


def test_rules_each_row_has_example_and_page_row() -> None:
    assert list(EXAMPLES) == [rule.name for rule in RULES]
    shown = re.findall(r"^\| `(.+)` \| (.+) \| .+ \|$", SECTION, re.MULTILINE)
    assert shown == [(rule.name, str(rule.role or "–")) for rule in RULES]


def test_roles_page_example_prints_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
    (shown,) = re.findall(r"```text\n(.*?)```", SECTION, re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out == shown
