"""Rules and roles of one parameter, by what is computed of it, and the page that explains them."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from lightning_sv.errors import ConfigError
from lightning_sv.roles import fake_model, weight_decay_roles
from lightning_sv.roles.classify import RULES, first_rule, uses_of_parameters
from lightning_sv.roles.dataflow import Dataflow
from lightning_sv.roles.trace import trace
from tests.conftest import ROOT

SECTION = (ROOT / "docs/architecture.md").read_text().partition("## How roles are found")[2]

Computed = Callable[[Any, Tensor], Tensor]
X = torch.rand(2, 5, 4, generator=torch.Generator().manual_seed(0))


class Example(nn.Module):
    """A function of this module and of x (2, 5, 4).

    The module has a parameter p, a vector a (4), learned queries q (3, 4), and matrices.
    """

    def __init__(self, shape: tuple[int, ...], computed: Computed) -> None:
        super().__init__()
        shapes = {"p": shape, "a": (4,), "q": (3, 4), "embed": (4, 4), "up": (8, 4)}
        for name, sizes in shapes.items():
            setattr(self, name, nn.Parameter(torch.rand(sizes), requires_grad=False))
        self.computed = computed

    def forward(self, x: Tensor) -> Tensor:
        return self.computed(self, x)

    def read(self, y: Tensor) -> Tensor:
        """Let a matrix read the last axis of y."""
        return F.linear(y.float(), self.up).tanh()


#: row -> shape and role of p, what is computed of it, and the rows that decide its uses, each once
EXAMPLES: dict[str, tuple[tuple[int, ...], str, Computed, list[str]]] = {
    "learned queries' matrix": ((4, 4), "matrix", lambda m, x: x + F.linear(m.q, m.p).mean(0), [
        "parameters alone", "learned queries' matrix", "bias"]),
    "learned queries' scale vector": ((4,), "multiplier", lambda m, x: x + F.layer_norm(m.q, (4,), m.p).mean(0), [
        "learned queries' scale vector"]),
    "learned queries' bias": ((4,), "bias", lambda m, x: (x @ torch.addmm(m.p, m.q, torch.ones(4, 4)).T).relu(), [
        "learned queries' bias"]),
    "parameters alone": ((4, 4), "matrix", lambda m, x: (x @ m.p.tanh()).relu(), ["parameters alone", "matrix"]),
    "lookup": ((9, 4), "embedding", lambda m, x: F.embedding(x.argsort(-1), m.p).relu(), ["lookup"]),
    "chosen rows": ((9, 4), "embedding", lambda m, x: m.p[x.argsort(-1)].relu(), ["chosen rows"]),
    "added table": ((9, 4), "embedding", lambda m, x: (x + m.p[:5]).relu(), ["parameters alone", "added table"]),
    "router": ((4, 4), "router", lambda m, x: x[..., :2] * (x @ m.p).softmax(-1).topk(2).values, [
        "router"]),
    "head": ((4, 4), "head", lambda m, x: x @ m.p, ["head"]),
    "matrix": ((4, 4), "matrix", lambda m, x: (x @ m.p).relu(), ["matrix"]),
    "bias": ((4,), "bias", lambda m, x: (x + m.p).relu(), ["bias"]),
    "scale vector": ((4,), "output", lambda m, x: m.p * x / x.square().mean(-1, keepdim=True).sqrt(), [
        "scale vector"]),
    "norm's statistics": ((4,), "output", lambda m, x: F.layer_norm(x, (4,), m.p), [
        "scale vector", "norm's statistics"]),
    "factor": ((4,), "multiplier", lambda m, x: x * m.p, ["factor"]),
    "attention's mask": ((5, 5), "bias", lambda m, x: _attention(x, x, x, m.p[None, None]), [
        "parameters alone", "attention's mask"]),
    "argument of attention": ((2, 1, 5, 4), "other", lambda m, x: _attention(m.p, x, x, None), [
        "argument of attention"]),
    "single factor": ((1,), "other", lambda m, x: x * m.p, ["single factor"]),
    "joined": ((2, 1, 4), "other", lambda m, x: torch.cat([m.p, x], 1), ["joined"]),
    "elementwise": ((4,), "other", lambda m, x: torch.atan2(x, m.p), ["elementwise"]),
}  # fmt: skip


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    query, key, value = (each if each.ndim == 4 else each[:, None] for each in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, mask)


@pytest.mark.parametrize("name", EXAMPLES)
def test_rules_each_row_decides_its_example(name: str) -> None:
    shape, role, computed, rows = EXAMPLES[name]
    model = Example(shape, computed)
    flow = Dataflow(trace(model, (X,), {}))
    uses = [use for use in uses_of_parameters(flow) if "p" in flow.sources[use.value]]
    rules = [first_rule(use) for use in uses]
    assert name in rows
    assert list(dict.fromkeys(rule and rule.name for rule in rules)) == rows
    assert weight_decay_roles(model, X)["p"].role == role


class Case(NamedTuple):
    """Role of p if `computed` is made of it and of x, whether it folds, and its gamma at 0."""

    role: str
    computed: Computed
    folds: bool | None = None
    to: float | None = None
    shape: tuple[int, ...] = (4,)
    op: str = ""  #: operation in a table of `ops` that the pass has


def _square(x: Tensor) -> Tensor:
    return x.pow(2).mean(-1, keepdim=True) + 1e-6


def _mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


def _rms(x: Tensor) -> Tensor:
    return F.rms_norm(x, (4,))


def _annotated(w: Tensor, x: Tensor) -> Tensor:
    return w * (x - _mean(x)) / (x.std(-1, keepdim=True) + 1e-6)


def _var_mean(w: Tensor, x: Tensor) -> Tensor:
    var, mean = torch.var_mean(x, -1, keepdim=True, correction=0)
    return w * (x - mean) * (var + 1e-6).rsqrt()


def _read_twice(w: Tensor, x: Tensor) -> Tensor:
    y = w * x
    return y * torch.rsqrt(_square(x)) + y


#: scale vectors in every order of a norm's operations
NORMED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "annotated": _annotated,
    "first": lambda w, x: w * x * torch.rsqrt(_square(x)),
    "first, to 1": lambda w, x: (1 + w) * x.double() / _square(x).sqrt(),
    "in place": lambda w, x: (x * w).mul_(torch.rsqrt(_square(x))),
    "inverse root": lambda w, x: w * (x * (2 / _square(x).pow(0.5))),
    "mean of a product": lambda w, x: (
        w * (x / (x * x).sum(-1, keepdim=True).clamp_min(1e-6).sqrt())
    ),
    "statistic": lambda w, x: x * (w * torch.rsqrt(_square(x))),
    "var_mean": _var_mean,
}
#: those of values that are not normalized, or normalized only afterwards
UNNORMED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "before a norm": lambda w, x: (w * x) / _square(w * x).sqrt(),
    "of another": lambda w, x: w * x * torch.rsqrt(_square(x.tanh())),
    "read twice": _read_twice,
    "square root": lambda w, x: w * x * _square(x).sqrt(),
    "fourth powers": lambda w, x: w * (x * x.pow(2).pow(2).mean(-1, keepdim=True).pow(-0.25)),
    "root of each entry": lambda w, x: w * (x / x.pow(2).sqrt()),
}
#: what a matrix W becomes with a gain g of its rows before it is used; whether it takes up a vector
WEIGHTS: dict[str, tuple[bool, Callable[[Tensor, Tensor], Tensor]]] = {
    "cast and joined": (True, lambda w, g: torch.cat([w.double()[:3], w.double()[3:]]).float() * 2),
    "gain": (True, lambda w, g: w * g),
    "gain first": (True, lambda w, g: g * w),
    "normalized": (False, lambda w, g: F.normalize(w, dim=-1) * g),
    "weight norm": (False, lambda w, g: torch._weight_norm(w, g, 0)),
    "function": (False, lambda w, g: w.tanh() * g),
}


def _shifted(y: Tensor) -> Tensor:
    return F.pad(y, (0, 0, 1, -1))


def _depthwise(y: Tensor, a: Tensor) -> Tensor:
    kernel = torch.stack([a, -a], -1)[:, None]
    return F.conv1d(y.mT, kernel, padding=1, groups=4).mT[:, :5]


#: what is done to a scaled value y before a matrix reads it, with other data x and a vector a: the
#: vector's role, and whether it folds
READ: dict[str, tuple[str, bool, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "last position": ("input", True, lambda y, x, a: y[:, [-1]]),
    "mean of positions": ("input", True, lambda y, x, a: y.mean(1)),
    "fixed weights": ("input", True, lambda y, x, a: torch.ones(3, 5) @ y),
    "token shift": ("input", True, lambda y, x, a: y * a + _shifted(y) * (1 - a)),
    "token shift by lerp": ("input", True, lambda y, x, a: torch.lerp(y, _shifted(y), a)),
    "chosen": ("input", True, lambda y, x, a: torch.where(x[..., :1] > 0, y, 0)),
    "convolution and itself": ("input", False, lambda y, x, a: y + _depthwise(y, a)),
    "convolution and itself, then relu": ("output", False, lambda y, x, a: (y + _depthwise(y, a)).relu()),
    "convolution and other data": ("output", False, lambda y, x, a: y + _depthwise(y, a) + x),
    "matrix, relu and itself": ("output", False, lambda y, x, a: y + (y @ torch.outer(a, a)).relu()),
    "gated": ("output", False, lambda y, x, a: y * x.sigmoid()),
    "averaged by data": ("output", False, lambda y, x, a: (x @ x.mT).softmax(-1) @ y),
    "gated by itself": ("output", False, lambda y, x, a: y * _shifted(y)),
    "residual": ("output", False, lambda y, x, a: x + y),
    "below": ("output", False, lambda y, x, a: x / y),
    "channels mixed": ("output", False, lambda y, x, a: y + y[:, :4].mT.sum(1, keepdim=True)),
    "mean of channels": ("output", False, lambda y, x, a: _mean(y).expand(2, 5, 4)),
    "upsampled, in no table": ("output", False, lambda y, x, a: F.interpolate(y.mT, scale_factor=2).mT),
}  # fmt: skip


def _capped(logits: Tensor) -> Tensor:
    return 15 * logits * torch.rsqrt(logits**2 + 225)


def _exponentials(logits: Tensor) -> Tensor:
    return (logits - logits.max(-1, keepdim=True).values).exp()


def _mask_of_best(scores: Tensor) -> Tensor:
    return scores >= scores.kthvalue(2, -1, keepdim=True).values


#: rows of a parameter (7, 4) that are added to x, and the parameter's role
ADDED: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "sliced and viewed": ("embedding", lambda p, x: p[None, 1:6].expand(2, 5, 4).to(torch.float64)),
    "positions": ("embedding", lambda p, x: p[torch.arange(5)]),
    "rows by data": ("bias", lambda p, x: p[x.sum(-1).argsort()]),
}
#: further computations in full
CASES: dict[str, Case] = {
    # logits of the last matrix
    "head, norm by hand": Case("head", lambda m, x: _var_mean(torch.ones(4), x @ m.p), shape=(4, 4)),
    "head, cap by hand": Case("head", lambda m, x: _capped(x @ m.p), shape=(4, 4)),
    "head, softmax by hand": Case("head", lambda m, x: _exponentials(x @ m.p), shape=(4, 4)),
    "head, its best row": Case("head", lambda m, x: (x @ m.p).argmax(-1), shape=(4, 4)),
    "maxima over positions": Case("matrix", lambda m, x: m.read((x @ m.p).max(1).values), shape=(4, 4)),
    "gain of rows": Case("multiplier", lambda m, x: F.linear(x, m.up * m.p).tanh(), shape=(8, 1)),
    # added to data, also in a factor of a norm's output
    "SeeDNorm": Case("bias", lambda m, x: m.read((m.p + (x * m.a).sum(-1, keepdim=True).tanh()) * _rms(x))),
    "bias of a linear map": Case("bias", lambda m, x: m.read((m.p + x @ torch.outer(m.a, m.a)) * _rms(x))),
    "bias of a norm": Case("bias", lambda m, x: m.read((m.p + _rms(x) * m.a) * _rms(x.tanh()))),
    # one number scales all channels alike
    "number after a norm": Case("other", lambda m, x: m.p * _rms(x), shape=(1,)),
    "number within a norm": Case("other", lambda m, x: m.p * x * _square(x).rsqrt(), shape=(1,)),
    "number before a norm": Case("other", lambda m, x: _rms(m.p * x), shape=(1,)),
    # operations in a table of `ops` that no family's row and no other example needs
    "batch norm": Case("output", lambda m, x: F.batch_norm(x, None, None, m.p, training=True), False, 0.0, (5,),
        "native_batch_norm"),
    "group norm": Case("output", lambda m, x: F.group_norm(x, 5, m.p), False, 0.0, (5,), "native_group_norm"),
    "kthvalue": Case("router", lambda m, x: _mask_of_best(x @ m.p) * x, shape=(4, 4),
        op="kthvalue"),
    "cross-entropy": Case("head", lambda m, x: F.cross_entropy((x @ m.p)[0], x[0].argsort(-1)[:, 0]), shape=(4, 4),
        op="nll_loss_forward"),
    "baddbmm": Case("matrix", lambda m, x: torch.baddbmm(x[:, :1], x, m.p).relu(), shape=(2, 4, 4), op="baddbmm"),
    "copy": Case("input", lambda m, x: m.read(torch.zeros_like(x).copy_(F.rms_norm(x, (4,), m.p))), True, 0.0,
        op="copy"),
}  # fmt: skip


def read_scaled(between: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Computed:
    return lambda m, x: m.read(between(_var_mean(m.p, x), x, m.a))


def read_by_matrix(change: Callable[[Tensor, Tensor], Tensor]) -> Computed:
    gain = torch.ones(8, 1)
    return lambda m, x: F.linear(_annotated(m.p, x), change(m.up, gain * m.a.sum())).tanh()


def read_sum(added: Callable[[Tensor, Tensor], Tensor]) -> Computed:
    return lambda m, x: m.read(_var_mean(m.a, x + added(m.p, x)))


def scaled(scale: Callable[[Tensor, Tensor], Tensor]) -> Computed:
    return lambda m, x: m.read(scale(m.p, x))


for _name, _scale in NORMED.items():
    CASES[f"normed, {_name}"] = Case("input", scaled(_scale), True, 1.0 if "1" in _name else 0.0)
for _name, _scale in UNNORMED.items():
    CASES[f"not normed, {_name}"] = Case("multiplier", scaled(_scale))
for _name, (_folds, _change) in WEIGHTS.items():
    CASES[f"matrix, {_name}"] = Case("input", read_by_matrix(_change), _folds, 0.0)
for _name, (_role, _folds, _between) in READ.items():
    CASES[f"read, {_name}"] = Case(_role, read_scaled(_between), _folds, 0.0)
for _name, (_role, _added) in ADDED.items():
    CASES[f"added, {_name}"] = Case(_role, read_sum(_added), shape=(7, 4))


def of_data(computed: Computed, shape: tuple[int, ...] = (4,)) -> Example:
    """Return an example in which x depends on a parameter, as embeddings do."""
    return Example(shape, lambda m, x: computed(m, x @ m.embed))


@pytest.mark.parametrize("name", CASES)
def test_role_of_parameter_by_what_is_computed(name: str) -> None:
    case = CASES[name]
    model = of_data(case.computed, case.shape)
    row = weight_decay_roles(model, (X,))["p"]  # positional arguments in a tuple
    assert (row.role, row.redundant, row.decays_to) == (case.role, case.folds, case.to)
    if case.op:
        assert case.op in {node.op for node in trace(model, (X,), {}).nodes}


def _chosen(m: Example, x: Tensor) -> Tensor:
    rows = (x.sum(-1) > 0).nonzero()
    return m.p * x[:, : len(rows)]


def _flexible(m: Example, x: Tensor) -> Tensor:
    out: Tensor = flex_attention(*[(m.p * x)[:, None]] * 3)  # type: ignore[call-overload]
    return out


def test_unreadable_values_and_higher_order_operators_refused_with_remedy() -> None:
    with pytest.raises(ConfigError, match=r"aten.nonzero.* fake"):
        weight_decay_roles(fake_model(lambda: of_data(_chosen)), X)
    weight_decay_roles(of_data(_chosen), X)  # real tensors have values
    with pytest.raises(ConfigError, match=r'set_attn_implementation\("sdpa"\)'):
        weight_decay_roles(of_data(_flexible), X)


def test_rules_each_row_has_example_and_page_row() -> None:
    assert list(EXAMPLES) == [rule.name for rule in RULES]
    shown = re.findall(r"^\| `(.+)` \| (.+) \| .+ \|$", SECTION, re.MULTILINE)
    assert shown == [(rule.name, str(rule.role or "–")) for rule in RULES]


def test_roles_page_example_prints_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
    (shown,) = re.findall(r"```text\n(.*?)```", SECTION, re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out == shown
