"""The role of every parameter of any model, against truths written by hand."""

import copy
import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.init import trunc_normal_
from torch.utils.checkpoint import checkpoint

from lightning_sv import Backbone, BackboneConfig
from lightning_sv.errors import ConfigError
from lightning_sv.interop import Roles, fake_model, to_hugging_face, weight_decay_roles
from lightning_sv.optim.groups import parameter_roles
from tests.conftest import GEMMA, MOE, thinned
from tests.roles.families import FAMILIES, Family, ends_in, find

#: families that every run checks: norms before, after and within, experts, state spaces, images
FEW = {"llama", "gemma3_text", "gpt2", "olmo2", "qwen3_moe", "mamba2", "bert", "vit"}


def expected_row(family: Family, name: str, parameter: nn.Parameter) -> list[object]:
    """Return role, target of decay and foldability of a parameter, by the family's row."""
    role = family.truth(name, parameter)
    if role not in ("input", "output"):
        return [role, None, None]
    is_one_plus_w = family.to_one == "*" or ends_in(name, family.to_one)
    folds = role == "input" and not ends_in(name, family.kept)
    return [role, 1.0 if is_one_plus_w else 0.0, folds]


def matched(pattern: str, names: list[str]) -> set[str]:
    """Return the names that a regular expression finds, which `match` finds, too."""
    found = {name for name in names if re.search(pattern, name)}
    assert found == {name for name in names if re.match(pattern, name)}
    return found


def check_patterns(roles: Roles) -> None:
    """Check that patterns match exactly the parameters without decay."""
    trained = [row.name for row in roles.parameters if row.trained]
    for policy in ("wd", "iwd", "owd", "nowd"):
        undecayed = set(roles.undecayed(policy))
        assert undecayed == set(trained) - set(roles.decayed(policy))
        found: set[str] = set()
        for pattern in roles.patterns(policy):
            found |= matched(pattern, trained)
        assert found == undecayed


def checked(family: Family, model: nn.Module) -> None:
    """Compare the roles of `model` with the family's row."""
    roles = weight_decay_roles(model)
    found: dict[str, list[object]] = {}
    expected: dict[str, list[object]] = {}
    for name, parameter in model.named_parameters():
        row = roles[name]
        found[name] = [row.role, row.decays_to, row.redundant]
        expected[name] = expected_row(family, name, parameter)
        is_matrix = row.role in ("matrix", "router", "head") and 1 not in parameter.shape
        assert row.in_axis is not None or not is_matrix, name
    assert found == expected
    check_patterns(roles)


@pytest.mark.parametrize(
    "family", thinned(FAMILIES, [f for f in FAMILIES if f.id in FEW]), ids=lambda f: f.id
)
def test_weight_decay_roles_any_family_equal_truth(family: Family) -> None:
    checked(family, family.build())


@pytest.mark.parametrize(
    "name", thinned(["gemma3_text", "qwen3_moe", "mamba2", "t5", "llava"], ["t5", "llava"])
)
def test_weight_decay_roles_fake_model_equal_truth(name: str) -> None:
    checked(find(name), fake_model(find(name).build, torch.bfloat16))


def test_fake_model_truncated_normal_draws_nothing() -> None:
    def draws() -> nn.Module:
        layer = nn.Linear(4, 4)
        for initialize in (trunc_normal_, nn.init.trunc_normal_):
            initialize(tensor=layer.weight, std=0.02)
        return layer

    assert fake_model(draws).weight.shape == (4, 4)
    assert trunc_normal_(torch.zeros(99)).std() > 0.5 and nn.Linear(2, 2).weight.abs().max() > 0


@pytest.mark.parametrize(
    "reads",
    [
        lambda: torch.linspace(0, 0.1, 3)[1].item(),
        lambda: nn.Linear(*torch.ones(3).nonzero().shape),
    ],
)
def test_fake_model_reading_a_number_refused(reads: Callable[[], nn.Module]) -> None:
    with pytest.raises(ValueError, match="fake tensor"):
        fake_model(reads)


@pytest.mark.parametrize("strategy", ["llama", "hg+er", "dp", "unified", "offset"])
@pytest.mark.parametrize("kind", [{}, MOE, GEMMA], ids=["llama", "moe", "gemma"])
def test_weight_decay_roles_backbone_equal_declared(strategy: str, kind: dict) -> None:
    if kind == GEMMA and strategy == "unified":
        pytest.skip("Gemma normalizes q and k already")
    model = Backbone(
        BackboneConfig(d_model=32, n_layer=2, n_head=2, vocab_size=48, **kind), strategy
    )
    roles = weight_decay_roles(model)
    assert {p.name: p.role for p in roles.parameters} == {
        p.name: p.role for p in parameter_roles(model)
    }
    to = 1.0 if strategy in ("offset", "hg+er") else 0.0
    # Q/K-norms and post-norms, and vectors after the norms of `dnp`, which no matrix reads at once
    after_norm = r"|^(?!.*router).*scale_out" if "dnp" in str(model.strategy) else ""
    vectors = [row for row in roles.parameters if row.role in ("input", "output")]
    for row in vectors:
        stays = re.search(f"_norm.scale{after_norm}", row.name)
        assert row.redundant is (stays is None), row.name
        assert row.decays_to == to, row.name


@pytest.mark.parametrize(("own", "to"), [("Softplus", math.log(2)), ("Composed", -0.5)])
def test_weight_decay_roles_own_parameterization_decays_to_its_gamma_at_zero(
    own: str, to: float
) -> None:
    roles = weight_decay_roles(
        Backbone(
            BackboneConfig(d_model=16, n_layer=1, n_head=2, vocab_size=48),
            f"tests.scale.test_vector:{own}",
        )
    )
    vectors = [p for p in roles.parameters if p.role == "input"]
    assert vectors and all(p.decays_to == pytest.approx(to) for p in vectors)


def test_weight_decay_roles_axes_and_heads_from_strides() -> None:
    roles = weight_decay_roles(find("gpt2").build())
    assert roles["transformer.h.0.attn.c_proj.weight"].in_axis == 0  # square, and stored (in, out)
    roles = weight_decay_roles(find("llama").build())
    assert roles["model.layers.0.self_attn.o_proj.weight"].in_axis == 1
    assert roles["model.layers.0.self_attn.k_proj.weight"].head_width == 8
    assert roles["model.layers.0.mlp.up_proj.weight"].head_width is None


class Mixed(nn.Module):
    """Modules with unusual names, and a choice of forward functions."""

    def __init__(self, how: str = "plain"):
        super().__init__()
        self.how = how
        self.table = nn.Parameter(torch.randn(11, 8))
        self.gamma = nn.Parameter(torch.ones(8))
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8, bias=False)
        self.scorer = nn.Linear(8, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))
        self.factor = nn.Parameter(torch.full((8,), 0.1))
        self.spare = nn.Parameter(torch.ones(3), requires_grad=how != "frozen")
        self.register_buffer("calls", torch.zeros(()))
        self.out = nn.Linear(8, 11, bias=False)
        self.queries = nn.Parameter(torch.randn(3, 8))
        self.reader = nn.Linear(8, 8)

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        x = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        return x * (1 + self.gamma)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        y = self.normed(x)
        if self.how == "quantized":
            step = y.abs().amax(-1, keepdim=True) / 127
            y = (y / step).round() * step
        best = torch.softmax(self.scorer(y), -1).max(-1).indices
        chosen = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = best == i
            if rows.any():
                chosen[rows] = expert(y[rows])
        return x + self.factor * torch.tanh(self.first(y)) * self.second(y) + chosen

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if ids.dtype is not torch.long:
            raise RuntimeError("ids, please")
        self.calls += 1
        x = self.table[ids]
        x = (
            checkpoint(self.block, x, use_reentrant=self.how == "reentrant")
            if "entrant" in self.how
            else self.block(x)
        )
        weights = torch.softmax(
            x @ self.reader(self.queries).T, -1
        )  # learned queries, through a matrix and a bias
        x = x + weights.sum(-1, keepdim=True)
        return self.out(x) + (self.spare.sum() if self.how == "plain" else 0)


IDS = torch.zeros(1, 5, dtype=torch.long)
TRUTH = {
    "table": "embedding", "gamma": "input", "first.weight": "matrix", "first.bias": "bias", "second.weight": "matrix",
    "queries": "matrix", "reader.weight": "matrix", "reader.bias": "bias",
    "scorer.weight": "router", "factor": "multiplier", "spare": "bias", "out.weight": "head",
} | {f"experts.{i}.weight": "matrix" for i in range(4)}  # fmt: skip


@pytest.mark.parametrize(
    "how",
    [
        "reentrant",
        "non-reentrant",
        "frozen",
        "autocast",
        "no_grad",
        "inference",
        "compiled",
        "bf16",
    ],
)
def test_weight_decay_roles_any_state_same_and_restored(how: str) -> None:
    model = Mixed(how if how in ("frozen", "reentrant", "non-reentrant") else "plain")
    known = {"spare": "bias"} if "entrant" in how else {}
    if how == "compiled":
        model.compile(backend="eager")
    if how == "bf16":
        model.bfloat16()
    model.second.eval()
    state = copy.deepcopy(model.state_dict())
    random = torch.random.get_rng_state()
    with (
        torch.autocast("cpu", enabled=how == "autocast"),
        torch.set_grad_enabled(how != "no_grad"),
        torch.inference_mode(how == "inference"),
    ):
        roles = weight_decay_roles(model, IDS, known)
    spare = "other" if how == "frozen" else "bias"
    assert {row.name: row.role for row in roles.parameters} == TRUTH | {"spare": spare}
    assert roles["gamma"].decays_to == 1
    assert roles["gamma"].redundant

    assert model.training
    assert not model.second.training
    assert {parameter.grad for parameter in model.parameters()} == {None}
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert torch.equal(torch.random.get_rng_state(), random)


def test_weight_decay_roles_unclassifiable_named() -> None:
    spare: dict[str, Any] = {"spare": "bias"}
    refused: list[tuple[str, Callable[[], Roles]]] = [
        ("'round'", lambda: weight_decay_roles(Mixed("quantized"), IDS, spare)),
        ("'spare'", lambda: weight_decay_roles(Mixed("other"), IDS)),
        ("ids, please", lambda: weight_decay_roles(Mixed(), IDS.float())),
        ("example=", lambda: weight_decay_roles(Mixed())),
        ("fake_model", lambda: weight_decay_roles(Mixed().to("meta"), IDS)),
        ("'spare'", lambda: weight_decay_roles(Mixed(), IDS, spare | {"spare": "scale"})),
        ("'spear'", lambda: weight_decay_roles(Mixed(), IDS, {"spear": "bias"})),
    ]
    for named, call in refused:
        with pytest.raises(ConfigError, match=named):
            call()
    known = weight_decay_roles(
        Mixed("quantized"), IDS, {"spare": "bias", "gamma": "input", "table": "other"}
    )
    assert known["gamma"].role == "input" and known["first.weight"].role == "matrix"
    assert known["table"].role == "other"  # given roles have priority over the trace


def test_weight_decay_roles_fake_model_reading_values_refused_with_reason() -> None:
    def chosen(m: Small, x: torch.Tensor) -> torch.Tensor:
        rows = (x.sum(-1) > 0).nonzero()
        return m.up(m.w * x[:, : len(rows)])

    with pytest.raises(ValueError, match=r"aten.nonzero.* fake"):
        weight_decay_roles(fake_model(lambda: Small(chosen)), IDS)
    weight_decay_roles(
        Small(lambda m, x: m.up(m.w * x * (x.sum() > 0).item())), IDS
    )  # real tensors have values


def _var_mean(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    var, mean = torch.var_mean(x, -1, keepdim=True, correction=0)
    return w * (x - mean) * (var + 1e-6).rsqrt()


def _square(x: torch.Tensor) -> torch.Tensor:
    return x.pow(2).mean(-1, keepdim=True) + 1e-6


def _mean(x: torch.Tensor) -> torch.Tensor:
    return x.mean(-1, keepdim=True)


#: scale vectors in every order of a norm's operations
NORMED = {
    "annotated": lambda w, x: w * (x - _mean(x)) / (x.std(-1, keepdim=True) + 1e-6),
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
UNNORMED = {
    "before a norm": lambda w, x: (w * x) / _square(w * x).sqrt(),
    "of another": lambda w, x: w * x * torch.rsqrt(_square(x.tanh())),
    "read twice": lambda w, x: (y := w * x) * torch.rsqrt(_square(x)) + y,
    "square root": lambda w, x: w * x * _square(x).sqrt(),
    "fourth powers": lambda w, x: w * (x * x.pow(2).pow(2).mean(-1, keepdim=True).pow(-0.25)),
    "root of each entry": lambda w, x: w * (x / x.pow(2).sqrt()),
}


class Small(nn.Module):
    """What `computed` makes of this module and of embedded ids; `parameters` by name, and two
    matrices."""

    def __init__(
        self, computed: Callable[["Small", torch.Tensor], torch.Tensor], **parameters: torch.Tensor
    ) -> None:
        super().__init__()
        self.computed = computed
        for name, value in ({"w": torch.ones(4)} | parameters).items():
            setattr(self, name, nn.Parameter(value, requires_grad=name != "a"))
        self.embed = nn.Embedding(11, 4)
        self.up = nn.Linear(4, 8)
        self.out = nn.Linear(8, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.computed(self, self.embed(ids)).float().tanh())


@pytest.mark.parametrize("how", [*NORMED, *UNNORMED])
def test_weight_decay_roles_norms_by_hand_any_order(how: str) -> None:
    scale = (NORMED | UNNORMED)[how]
    row = weight_decay_roles(Small(lambda m, x: m.up(scale(m.w, x).float())), IDS)["w"]
    assert row.role == ("input" if how in NORMED else "multiplier")
    assert row.redundant is (True if how in NORMED else None)
    at_zero = 1 if "1" in how else 0
    assert row.decays_to == (None if how in UNNORMED else at_zero)


#: what a matrix W becomes with a gain g of its rows before it is used; whether it takes up a vector
#: before it
WEIGHTS = {
    "cast and joined": (True, lambda w, g: torch.cat([w.double()[:3], w.double()[3:]]).float() * 2),
    "gain": (True, lambda w, g: w * g),
    "gain first": (True, lambda w, g: g * w),
    "normalized": (False, lambda w, g: nn.functional.normalize(w, dim=-1) * g),
    "weight norm": (False, lambda w, g: torch._weight_norm(w, g, 0)),
    "function": (False, lambda w, g: w.tanh() * g),
}


@pytest.mark.parametrize("how", WEIGHTS)
def test_weight_decay_roles_function_of_matrix_folds_or_not(how: str) -> None:
    takes, change = WEIGHTS[how]

    def weighted(m: Small, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(
            NORMED["annotated"](m.w, x), change(m.up.weight, m.gain), m.up.bias
        )

    model = Small(weighted, gain=torch.ones(8, 1))
    model.gain.requires_grad_(how != "cast and joined")
    roles = weight_decay_roles(model, IDS)
    assert roles["w"].role == "input" and roles["w"].redundant is takes
    assert roles["up.weight"].role == "matrix" and roles["up.weight"].in_axis == 1
    assert roles["gain"].role == ("other" if how == "cast and joined" else "multiplier")


def _shifted(y: torch.Tensor) -> torch.Tensor:
    return nn.functional.pad(y, (0, 0, 1, -1))


def _depthwise(y: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    kernel = torch.stack([a, -a], -1)[:, None]
    return nn.functional.conv1d(y.mT, kernel, padding=1, groups=4).mT[:, :5]


#: what is done to a scaled value y (1, 5, 4) before a matrix reads it, with other data x and a
#: vector a: the vector's role, and whether it folds
READ: dict[str, tuple[str, bool, Callable[..., torch.Tensor]]] = {
    "last position": ("input", True, lambda y, x, a: y[:, [-1]]),
    "mean of positions": ("input", True, lambda y, x, a: y.mean(1)),
    "fixed weights": ("input", True, lambda y, x, a: torch.ones(3, 5) @ y),
    "upsampled": ("input", True, lambda y, x, a: nn.functional.interpolate(y.mT, scale_factor=2).mT),
    "token shift": ("input", True, lambda y, x, a: y * a + _shifted(y) * (1 - a)),
    "token shift by lerp": ("input", True, lambda y, x, a: torch.lerp(y, _shifted(y), a)),
    "written in place": ("input", True, lambda y, x, a: _shifted(y).add_(y)),
    "chosen": ("input", True, lambda y, x, a: torch.where(x[..., :1] > 0, y, 0)),
    "convolution and itself": ("input", False, lambda y, x, a: y + _depthwise(y, a)),
    "convolution and itself, then relu": ("output", False, lambda y, x, a: (y + _depthwise(y, a)).relu()),
    "convolution and other data": ("output", False, lambda y, x, a: y + _depthwise(y, a) + x),
    "matrix, relu and itself": ("output", False, lambda y, x, a: y + (y @ torch.outer(a, a)).relu()),
    "gated": ("output", False, lambda y, x, a: y * x.sigmoid()),
    "averaged by data": ("output", False, lambda y, x, a: (x @ x.mT).softmax(-1) @ y),
    "gated by itself": ("output", False, lambda y, x, a: y * _shifted(y)),
    "averaged by itself": ("output", False, lambda y, x, a: (x @ y.mT).softmax(-1) @ y),
    "residual": ("output", False, lambda y, x, a: x + y),
    "below": ("output", False, lambda y, x, a: x / y),
    "channels mixed": ("output", False, lambda y, x, a: y + y[:, :4].mT.sum(1, keepdim=True)),
    "mean of channels": ("output", False, lambda y, x, a: y.mean(-1, keepdim=True).expand(1, 5, 4)),
    "softmax": ("output", False, lambda y, x, a: y.softmax(-1)),
}  # fmt: skip


@pytest.mark.parametrize("how", READ)
def test_weight_decay_roles_linear_readers_make_input(how: str) -> None:
    role, folds, between = READ[how]

    model = Small(lambda m, x: m.up(between(NORMED["var_mean"](m.w, x), x, m.a)), a=torch.rand(4))
    row = weight_decay_roles(model, (IDS,))["w"]  # positional arguments in a tuple
    assert (row.role, row.redundant) == (role, folds)


#: what is done to the logits y of the last matrix: its role
LAST: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "norm by hand": ("head", lambda y: y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)),
    "cap by hand": ("head", lambda y: 15 * y * torch.rsqrt(y**2 + 225)),
    "relu": ("matrix", lambda y: y.relu()),
}


@pytest.mark.parametrize("how", LAST)
def test_weight_decay_roles_head_before_function_of_logits(how: str) -> None:
    role, after = LAST[how]

    class Last(Small):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return after(super().forward(ids))

    assert weight_decay_roles(Last(lambda m, x: m.up(x * m.w)), IDS)["out.weight"].role == role


def test_weight_decay_roles_exported_head() -> None:
    model = Backbone(BackboneConfig(d_model=16, n_layer=1, n_head=2, vocab_size=48), "unified")
    assert weight_decay_roles(to_hugging_face(model))["lm_head.linear.weight"].role == "head"


def test_weight_decay_roles_higher_order_operator_refused() -> None:
    def flexible(m: Small, x: torch.Tensor) -> torch.Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        return m.up(flex_attention(*[(m.w * x)[:, None]] * 3)[:, 0])  # type: ignore[call-overload]

    with pytest.raises(ValueError, match=r'set_attn_implementation\("sdpa"\)'):
        weight_decay_roles(Small(flexible), IDS)


#: what is added to x (1, 5, 4) of a parameter (7, 4), and whether the parameter is then a table or
#: a bias
ADDED: dict[str, tuple[str, Callable[..., torch.Tensor]]] = {
    "sliced and viewed": ("embedding", lambda p, x: p[None, 1:6].expand(1, 5, 4).to(torch.float64)),
    "positions": ("embedding", lambda p, x: p[torch.arange(5)]),
    "rows by data": ("bias", lambda p, x: p[x.sum(-1).argsort()]),
}


@pytest.mark.parametrize("how", ADDED)
def test_weight_decay_roles_rows_by_position_are_embedding(how: str) -> None:
    role, added = ADDED[how]
    model = Small(
        lambda m, x: m.up(NORMED["var_mean"](m.w, x + added(m.p, x)).float()), p=torch.ones(7, 4)
    )
    assert weight_decay_roles(model, IDS)["p"].role == role


class Counting(nn.Module):
    """Count in buffers, and keep a table that grows with the inputs."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.fails = fails
        self.longest = 0
        self.embed = nn.Embedding(11, 4)
        self.out = nn.Linear(4, 11)
        self.register_buffer("calls", torch.zeros(3))
        self.register_buffer("first", self.calls[:1])  # a view of another
        self.register_buffer("tokens", torch.zeros(()))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.tokens = self.tokens + ids.numel()
        if ids.shape[1] > self.longest:
            self.register_buffer("table", torch.ones(ids.shape[1]), persistent=False)
            self.longest = ids.shape[1]
        if self.fails:
            raise RuntimeError("too late")
        return self.out(self.embed(ids) + self.table[: ids.shape[1], None])


@pytest.mark.parametrize("how", ["plain", "fails", "inference", "called before"])
def test_weight_decay_roles_any_pass_buffers_restored(how: str) -> None:
    model = Counting(how == "fails")
    if how == "called before":
        model(IDS[:, :2])
    kept = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    longest = model.longest
    with torch.inference_mode(how == "inference"):
        for _ in range(2):  # the second pass would not find a table that went without its length
            with pytest.raises(ValueError, match="too late") if how == "fails" else nullcontext():
                weight_decay_roles(model, IDS)
    now = dict(model.named_buffers())
    assert list(now) == list(kept) and model.longest == longest
    assert all(
        now[name] is was and torch.equal(was, numbers) for name, (was, numbers) in kept.items()
    )


def _rms(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.rms_norm(x, (4,))


#: what is computed of x (1, 5, 4), a vector w and other parameters a, before a matrix reads it: w's role
SUMMANDS: dict[str, tuple[str, Callable[..., torch.Tensor]]] = {
    "SeeDNorm": ("input", lambda w, a, x: (w + (x * a).sum(-1, keepdim=True).tanh()) * _rms(x)),
    "1 + w, cast": ("input", lambda w, a, x: _rms(x) * (1 + w + (x * a).tanh()).double().float()),
    "read by others": ("bias", lambda w, a, x: (y := w + (x * a).tanh()) * _rms(x) + y),
    "residual": ("output", lambda w, a, x: x + (w + (x * a).tanh()) * _rms(x)),
    "bias of a linear map": ("bias", lambda w, a, x: (w + x @ torch.outer(a, a)) * _rms(x)),
    "bias of a norm": ("bias", lambda w, a, x: (w + _rms(x) * a) * _rms(x.tanh())),
}


@pytest.mark.parametrize("how", SUMMANDS)
def test_weight_decay_roles_summand_has_role_of_sum(how: str) -> None:
    role, computed = SUMMANDS[how]
    model = Small(lambda m, x: m.up(computed(m.w, m.a, x)), a=torch.rand(4))
    row = weight_decay_roles(model, IDS)["w"]
    assert (row.role, row.decays_to) == (role, None)
    assert row.redundant is (None if role == "bias" else False)
