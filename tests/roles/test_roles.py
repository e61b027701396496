"""The role of every parameter of any model, against truths written by hand."""

import copy
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.init import trunc_normal_
from torch.utils.checkpoint import checkpoint

from lightning_sv import Backbone, BackboneConfig
from lightning_sv.errors import ConfigError
from lightning_sv.interop import fake_model, to_hugging_face, weight_decay_roles
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


def checked(family: Family, model: nn.Module) -> None:
    """Compare the roles of `model` with the family's row."""
    roles = weight_decay_roles(model, family.example)
    found: dict[str, list[object]] = {}
    expected: dict[str, list[object]] = {}
    for name, parameter in model.named_parameters():
        row = roles[name]
        found[name] = [row.role, row.decays_to, row.redundant]
        expected[name] = expected_row(family, name, parameter)
        is_matrix = row.role in ("matrix", "router", "head") and 1 not in parameter.shape
        assert row.in_axis is not None or not is_matrix, name
    assert found == expected
    for policy in ("wd", "iwd", "owd", "nowd"):
        decayed = {row.name for row in roles.parameters if row.trained and row.decays(policy)}
        assert set(roles.decayed(policy)) == decayed
        assert (
            set(roles.undecayed(policy))
            == {r.name for r in roles.parameters if r.trained} - decayed
        )


@pytest.mark.parametrize(
    "family", thinned(FAMILIES, [f for f in FAMILIES if f.id in FEW]), ids=lambda f: f.id
)
def test_weight_decay_roles_any_family_equal_truth(family: Family) -> None:
    checked(family, family.build())


@pytest.mark.parametrize(
    ("name", "named"),
    [("vit", "needs pixel_values"), ("whisper", "needs input_features"), ("llava", "is not used")],
)
def test_weight_decay_roles_images_and_speech_need_an_example(name: str, named: str) -> None:
    with pytest.raises(ConfigError, match=f"{named}.* example"):
        weight_decay_roles(find(name).build())


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
    to = {"offset": 1.0, "hg+er": None, "unified": None}.get(strategy, 0.0)  # one number or None
    # Q/K-norms and post-norms, and vectors after the norms of `dnp`, which no matrix reads at once
    after_norm = r"|^(?!.*router).*scale_out" if "dnp" in str(model.strategy) else ""
    vectors = [row for row in roles.parameters if row.role in ("input", "output")]
    for row in vectors:
        stays = re.search(f"_norm.scale{after_norm}", row.name)
        assert row.redundant is (stays is None), row.name
        is_after_matrix = ".scale_out." in row.name  # where the trace sees a factor, not a vector
        assert row.decays_to == (None if is_after_matrix else to), row.name


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
    """Unusual names, a choice of forward functions, and buffers that change in each pass."""

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
        self.out = nn.Linear(8, 11, bias=False)
        self.queries = nn.Parameter(torch.randn(3, 8))
        self.reader = nn.Linear(8, 8)
        self.longest = 0
        self.register_buffer("calls", torch.zeros(3))
        self.register_buffer("first_calls", self.calls[:1])  # a view of another

    def count(self, n: int) -> None:
        """Write into a buffer, and keep one that grows with the inputs."""
        self.calls += 1
        if n > self.longest:
            self.register_buffer("positions", torch.zeros(n), persistent=False)
            self.longest = n

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
        self.count(ids.shape[1])
        if ids.dtype is not torch.long:
            raise RuntimeError("ids, please")
        x = self.table[ids] + self.positions[: ids.shape[1], None].to(self.table.dtype)
        if "entrant" in self.how:
            x = checkpoint(self.block, x, use_reentrant=self.how == "reentrant")
        else:
            x = self.block(x)
        # learned queries, through a matrix and a bias
        weights = torch.softmax(x @ self.reader(self.queries).T, -1)
        x = x + weights.sum(-1, keepdim=True)
        return self.out(x) + (self.spare.sum() if self.how == "plain" else 0)


IDS = torch.zeros(1, 5, dtype=torch.long)
TRUTH = {
    "table": "embedding", "gamma": "input", "first.weight": "matrix", "first.bias": "bias", "second.weight": "matrix",
    "queries": "matrix", "reader.weight": "matrix", "reader.bias": "bias",
    "scorer.weight": "router", "factor": "multiplier", "spare": "bias", "out.weight": "head",
} | {f"experts.{i}.weight": "matrix" for i in range(4)}  # fmt: skip


@contextmanager
def restored(model: Mixed) -> Iterator[None]:
    """Check that modes, gradients, buffers and random numbers are afterwards as before."""
    modes = [module.training for module in model.modules()]
    buffers = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    state = copy.deepcopy(model.state_dict())
    random = torch.random.get_rng_state()
    yield
    assert [module.training for module in model.modules()] == modes
    assert {parameter.grad for parameter in model.parameters()} == {None}
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    now = dict(model.named_buffers())
    for name, (buffer, numbers) in buffers.items():
        is_restored = now[name] is buffer and torch.equal(buffer, numbers)
        assert is_restored or name == "positions"
    assert torch.equal(torch.random.get_rng_state(), random)


STATES = [
    "reentrant", "non-reentrant", "frozen", "autocast", "no_grad", "inference", "compiled", "bf16",
    "called before",
]  # fmt: skip


@pytest.mark.parametrize("how", STATES)
def test_weight_decay_roles_any_state_same_and_restored(how: str) -> None:
    model = Mixed(how if how in ("frozen", "reentrant", "non-reentrant") else "plain")
    known = {"spare": "bias"} if "entrant" in how else {}
    if how == "compiled":
        model.compile(backend="eager")
    if how == "bf16":
        model.bfloat16()
    if how == "called before":
        model(IDS[:, :2])
    model.second.eval()
    with (
        restored(model),
        torch.autocast("cpu", enabled=how == "autocast"),
        torch.set_grad_enabled(how != "no_grad"),
        torch.inference_mode(how == "inference"),
    ):
        for _ in range(2):
            roles = weight_decay_roles(model, IDS, known)
    spare = "other" if how == "frozen" else "bias"
    assert {row.name: row.role for row in roles.parameters} == TRUTH | {"spare": spare}
    assert roles["gamma"].decays_to == 1
    assert roles["gamma"].redundant


def test_weight_decay_roles_unclassifiable_named() -> None:
    spare: dict[str, Any] = {"spare": "bias"}
    refused: list[tuple[str, Mixed, Any, dict[str, Any]]] = [
        ("'round'.* apply_strategy does not", Mixed("quantized"), IDS, spare),
        ("'spare'", Mixed("other"), IDS, {}),
        ("ids, please", Mixed(), IDS.float(), {}),
        ("example=", Mixed(), None, {}),
        ("fake_model", Mixed().to("meta"), IDS, {}),
        ("'spare'", Mixed(), IDS, {"spare": "scale"}),
        ("'spear'", Mixed(), IDS, {"spear": "bias"}),
    ]
    for named, model, example, known in refused:
        is_meta = next(model.parameters()).is_meta  # without values to compare
        kept = nullcontext() if is_meta else restored(model)
        with kept, pytest.raises(ConfigError, match=named):
            weight_decay_roles(model, example, known)
    known = weight_decay_roles(
        Mixed("quantized"), IDS, {"spare": "bias", "gamma": "input", "table": "other"}
    )
    assert known["gamma"].role == "input" and known["first.weight"].role == "matrix"
    assert known["table"].role == "other"  # given roles have priority over the trace


def test_weight_decay_roles_exported_head() -> None:
    model = Backbone(BackboneConfig(d_model=16, n_layer=1, n_head=2, vocab_size=48), "unified")
    assert weight_decay_roles(to_hugging_face(model))["lm_head.linear.weight"].role == "head"
