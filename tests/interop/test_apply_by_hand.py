"""A strategy on models written by hand, in which an undetected case would change the outputs
silently."""

import collections
import copy
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sv import Backbone, BackboneConfig
from lightning_sv.errors import ConfigError
from lightning_sv.interop import (
    apply_strategy,
    fake_model,
    fold_applied,
    param_groups,
    weight_decay_roles,
)
from lightning_sv.interop.apply.weights import ScaledWeight
from tests.conftest import thinned
from tests.interop.test_apply import named, perturb, unchanged

pytestmark = pytest.mark.filterwarnings("ignore:apply_strategy has:UserWarning")
D = 16
V = 32
IDS = torch.arange(16).view(2, 8) % V
Read = Callable[["Net", Tensor], Any]


class Net(nn.Module):
    """An embedding, a norm with a trained gamma, a matrix and a head; `read` combines them."""

    def __init__(self, read: Read, width: int = V):
        super().__init__()
        self.emb = nn.Embedding(V, D)
        self.norm = nn.RMSNorm(D)
        self.matrix = nn.Linear(D, width, bias=False)
        self.head = nn.Linear(D, V)
        self.read = read
        with torch.no_grad():
            self.norm.weight += 0.3 * torch.randn(D)

    def forward(self, ids: Tensor) -> Any:
        return self.read(self, self.norm(self.emb(ids)))


def plain(net: Net, x: Tensor) -> Tensor:
    out: Tensor = net.head(x) * torch.sigmoid(net.matrix(x))
    return out


class Writing(nn.Module):
    """Write into the input, and compare two inputs by identity as attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.added = nn.Parameter(torch.randn(D))
        self.norm = nn.RMSNorm(D)
        self.head = nn.Linear(D, V)

    def forward(self, x: Tensor, same: Tensor) -> Tensor:
        x += self.added
        return self.head(self.norm(x)) if x is same else x  # type: ignore[no-any-return]


@pytest.mark.parametrize("inference", [False, True])
def test_apply_strategy_model_writing_into_example_does_not_change_it(inference: bool) -> None:
    model = Writing()
    with torch.inference_mode(inference):
        x = torch.randn(2, D)
        before = x.clone()
        assert apply_strategy(model, "hg+dp+or", (x, x)).same_function
        assert torch.equal(x, before)


@dataclasses.dataclass(slots=True)
class Slots:
    logits: Tensor


PADDING = torch.arange(V) >= V - 4
CONTAINERS: dict[str, Callable[[Tensor], Any]] = {
    "a dataclass": Slots,
    "a tuple": lambda out: (0, out),
    "a dataclass inside": lambda out: (0, Slots(out)),
    "a mapping": lambda out: collections.UserDict(scores=out),
    "-inf": lambda out: out.masked_fill(PADDING, -torch.inf),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_apply_strategy_any_container_outputs_compared(name: str) -> None:
    container = CONTAINERS[name]
    report = apply_strategy(Net(lambda net, x: container(plain(net, x))), "hg+dp+or", IDS)
    assert 0 < report.difference < 1e-5  # 0 would be of nothing compared
    net = Net(lambda net, x: container(plain(net, x) + F.linear(x, net.stored[0])))
    net.stored = [net.matrix.weight]  # read a second time, without its vectors
    with unchanged(net), pytest.raises(ConfigError, match="outputs of Net"):
        apply_strategy(net, "hg+dp", IDS)


@pytest.mark.parametrize("strategy", ["hg+dp+or", "or", "unified"])
def test_apply_strategy_outputs_next_to_logits_noted_if_they_change(strategy: str) -> None:
    net = Net(lambda net, x: {"logits": plain(net, x), "states": (x, net.emb.weight)})
    report = apply_strategy(net, strategy, IDS)
    changed = [name for name, _ in report.notes if name.startswith("output")]
    assert changed == ([] if strategy == "or" else ["output['states'][0]"])


def test_apply_strategy_training_branch_is_frozen_first_and_noted() -> None:
    net = Net(lambda net, x: (plain(net, x), net.ahead(x)) if net.training else plain(net, x))
    net.ahead = nn.Linear(D, V, bias=False)
    with unchanged(net), pytest.raises(ConfigError, match=r"ahead\.weight .*freeze"):
        apply_strategy(net, "hg+dp", IDS)
    net.ahead.requires_grad_(False)
    report = apply_strategy(net, "hg+dp", IDS)
    assert dict(report.notes).keys() == {"ahead.weight"}


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "norm before": lambda: nn.Sequential(nn.RMSNorm(D), nn.Linear(D, D)),
    "norm after": lambda: nn.Sequential(nn.Linear(D, D), nn.RMSNorm(D)),
}


@pytest.mark.parametrize("strategy", ["hg", "ap"])
@pytest.mark.parametrize("layer", LAYERS)
def test_apply_strategy_skipped_layer_with_norm_refused(layer: str, strategy: str) -> None:
    def read(net: Any, x: Tensor) -> Tensor:
        for layer in net.layers[: net.depth]:
            x = x + layer(x)
        return net.head(torch.tanh(x))  # type: ignore[no-any-return]

    net = Net(read)
    net.layers = nn.ModuleList(LAYERS[layer]() for _ in range(3))
    net.depth = 1
    net.matrix = None
    with unchanged(net), pytest.raises(ConfigError, match=r"layers\.1"):
        apply_strategy(net, strategy, IDS)
    net.depth = 3
    assert apply_strategy(net, strategy, IDS).same_function


def test_apply_strategy_layer_of_learned_queries_is_reached() -> None:
    def read(net: Net, x: Tensor) -> Tensor:
        y = x + net.layers[0](net.queries)
        return net.head(torch.tanh(net.layers[1](y)))  # type: ignore[no-any-return]

    net = Net(read)
    net.queries = nn.Parameter(torch.randn(1, D))
    net.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D)) for _ in range(2))
    net.matrix = None
    roles = weight_decay_roles(net, IDS)
    assert {"layers.0.0.bias", "layers.0.0.weight"} <= set(roles.undecayed("iwd"))
    assert roles["layers.0.1.weight"].role == "matrix"
    report = apply_strategy(net, "hg+dp+or", IDS)
    assert report.same_function
    assert not any(vector.startswith("layers.0") for vector in report.vectors)
    assert any(vector.startswith("layers.1") for vector in report.vectors)


def test_apply_strategy_in_other_modes_of_torch_trains() -> None:
    net = Net(plain)
    with torch.inference_mode(), torch.device("meta"):
        apply_strategy(net, "hg+dp+or", IDS)
    net(IDS).sum().backward()
    assert all(
        parameter.grad is not None for parameter in net.parameters() if parameter.requires_grad
    )


@pytest.mark.parametrize(
    ("key", "call"),
    [
        ("model", lambda net: apply_strategy(nn.Linear, "hg")),
        ("model", lambda net: apply_strategy(nn.Sequential(net, nn.LazyLinear(D)), "hg", IDS)),
        ("model", lambda net: weight_decay_roles(nn.LazyLinear(D), IDS)),
        ("model", lambda net: fold_applied(net.state_dict())),
        ("model", lambda net: weight_decay_roles(nn.Linear)),
    ],
)
def test_wrong_type_of_an_argument_refused(key: str, call: Callable[[Net], object]) -> None:
    with pytest.raises(ConfigError, match=f"^{key} is"):
        call(Net(plain))


ADDED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "positions": lambda net, x: x + torch.arange(8 * D, dtype=x.dtype).view(8, D).sin(),
    "number": lambda net, x: x + 0.5,
    "two biases": lambda net, x: x + net.bias + net.table[0],
    "class token": lambda net, x: torch.cat([net.table[:1].expand(len(x), 1, D), x], 1),
    "fill": lambda net, x: x.masked_fill(torch.arange(8)[:, None] % 2 == 0, 0.5),
    "bias": lambda net, x: x + net.bias,
}


@pytest.mark.parametrize("name", ADDED)
def test_apply_strategy_vector_moves_behind_its_norm_only_with_one_bias(name: str) -> None:
    """In bfloat16 the check of the outputs allows a difference of 0.1, so it would accept scaled
    positions."""
    net = Net(lambda net, x: plain(net, ADDED[name](net, x)))
    net.bias = nn.Parameter(torch.randn(D))
    net.table = nn.Parameter(torch.randn(8, D), requires_grad=False)
    report = apply_strategy(net.bfloat16(), "hg+dp", IDS)
    moves = name == "bias"
    assert ("norm.weight" in dict(report.notes)) is not moves
    assert ("matrix.parametrizations.weight.0.parts.0.scale_in" in report.vectors) is moves
    assert report.difference <= 0.1 * moves


def test_apply_strategy_block_at_several_places_has_vectors() -> None:
    block = nn.Sequential(nn.RMSNorm(D), nn.Linear(D, D), nn.Tanh())
    model = nn.Sequential(nn.Embedding(V, D), *[block] * 3, nn.RMSNorm(D), nn.Linear(D, V))
    before = model(IDS)
    report = apply_strategy(model, "hg+dp+or", IDS)
    assert not report.notes and len(report.vectors) == 4
    torch.testing.assert_close(model(IDS), before)
    perturb(model)
    before = model(IDS)
    torch.testing.assert_close(fold_applied(model)(IDS), before)
    apply_strategy(model, "ap", IDS)
    state = model.state_dict() | {"3.0.weight": torch.full((D,), 2.0)}
    with pytest.raises(ConfigError, match=r"^3\.0\.weight is"):
        model.load_state_dict(state)


def _attention(sizes: tuple[int, ...], order: tuple[int, ...]) -> Read:
    """Attention by one matrix for q, k and v; `order` makes its result (batch, T, *sizes, width)
    that of attention."""

    def read(net: Net, x: Tensor) -> Tensor:
        q, k, v = net.matrix(x).view(2, 8, *sizes, D // 2).permute(order).unbind(0)
        out: Tensor = net.head(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out

    return read


def _heads(split: Callable[[Tensor], Any]) -> Read:
    """Attention by one matrix, viewed as heads before `split` takes two for q, one for k and one
    for v."""

    def read(net: Net, x: Tensor) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in split(net.matrix(x).view(2, 8, 4, D // 2)))
        return net.head(
            F.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q))
            .transpose(1, 2)
            .flatten(2)
        )  # type: ignore[no-any-return]

    return read


def _shared(net: Net, x: Tensor) -> Tensor:
    query = net.matrix(x)[:, None]
    value = net.head(x)[:, None]
    return F.scaled_dot_product_attention(query, F.normalize(query, dim=-1), value)[:, 0]


#: reading of matrices that are one weight, their number, and the number of their vectors: one
#: alone keeps gamma_in in its norm
FUSED: dict[str, tuple[Read, int, int]] = {
    "queries that are also keys": (_shared, 2, 2),
    "glu": (lambda net, x: net.head(F.glu(net.matrix(x))), 2, 4),
    "glu of each head": (
        lambda net, x: net.head(F.glu(net.matrix(x).unflatten(-1, (4, -1)), -1).flatten(-2)),
        2,
        1,
    ),
    "q, k and v one after the other": (_attention((3, 2), (2, 0, 3, 1, 4)), 3, 6),
    "heads, split": (_heads(lambda y: y.split([2, 1, 1], 2)), 2, 6),
    "heads, indexed": (_heads(lambda y: (y[:, :, :2], y[:, :, [2]], y[:, :, [3]])), 2, 1),
    "q, k and v of each head": (_attention((2, 3), (3, 0, 2, 1, 4)), 3, 1),
    "interleaved": (
        lambda net, x: net.head(torch.mul(*net.matrix(x).unflatten(-1, (-1, 2)).unbind(-1))),
        2,
        1,
    ),
    "a convolution": (
        lambda net, x: net.head(torch.mul(*_depthwise(net.matrix(x)).chunk(2, -1))),
        2,
        4,
    ),
}


@pytest.mark.parametrize("name", FUSED)
def test_apply_strategy_fused_matrices_have_own_vectors(name: str) -> None:
    read, matrices, vectors = FUSED[name]
    report = apply_strategy(Net(read, matrices * D), "hg+dp", IDS)
    assert sum(path.startswith("matrix") for path in report.vectors) == vectors
    assert any("hg is partial" in note for _, note in report.notes) == (vectors == 1)


def _queries(made: Callable[[Tensor], Tensor]) -> Read:
    """Attention of the queries `made` of one matrix, heads of width 8, to heads of `net.head`."""

    def read(net: Net, x: Tensor) -> Tensor:
        q, keys = (
            y.reshape(2, 8, -1, 8).transpose(1, 2) for y in (made(net.matrix(x)), net.head(x))
        )
        return F.scaled_dot_product_attention(q.expand_as(keys), keys, keys)

    return read


def _rotated(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a * 0.6 - b * 0.8, b * 0.6 + a * 0.8


def _rotated_completely(y: Tensor) -> Tensor:
    heads = y.view(2, 8, -1, 8)
    first, second = heads.chunk(2, -1)
    rotated = heads * 0.6 + torch.cat([-second, first], -1) * 0.8
    return torch.cat([rotated, heads[..., 8:]], -1)  # the rest has no channels


def _depthwise(y: Tensor) -> Tensor:
    width = y.shape[-1]
    kernel = torch.linspace(0.5, 2, 2 * width, dtype=y.dtype).view(width, 1, 2)
    return F.conv1d(y.mT, kernel, padding=1, groups=width)[..., :-1].mT


def _convolved_together(net: Net, x: Tensor) -> Tensor:
    both = F.silu(_depthwise(torch.cat([net.head(x), net.matrix(x)], -1))).split(V, -1)
    keys, queries = (y.view(2, 8, 4, 8).transpose(1, 2) for y in both)
    return F.scaled_dot_product_attention(queries, keys, keys)


#: reading of one matrix, its outputs, and the channels that a norm of `dnp` covers
ONE: dict[str, tuple[Read, int, int]] = {
    "queries of a key": (_queries(lambda y: y.view(2, 8, 2, 2, 8)), V, 8),
    "one head in halves": (_queries(lambda y: torch.cat(_rotated(*y.chunk(2, -1)), -1)), 8, 8),
    "heads rotated completely": (_queries(_rotated_completely), V, 8),
    "a new axis": (
        lambda net, x: net.head(x) * (net.matrix(x)[..., None] * torch.arange(3)).sum(-1),
        V,
        V,
    ),
    "a convolution of queries and keys": (_convolved_together, V, 8),
    "padding not read": (
        lambda net, x: net.head(x)[..., :8] * torch.sigmoid(net.matrix(x)[..., :8]),
        12,
        12,
    ),
}


@pytest.mark.parametrize("name", ONE)
def test_apply_strategy_one_matrix_is_not_split_and_its_heads_are_found(name: str) -> None:
    read, outputs, width = ONE[name]
    net = Net(read, outputs)
    assert not apply_strategy(net, "hg+dnp", IDS).notes
    assert net.matrix.output_norm.width == width


@pytest.mark.parametrize("strategy", ["or", "er"])
def test_apply_strategy_column_is_one_vector(strategy: str) -> None:
    """A row per channel would be normalized to 1, so that only its beta trains."""
    net = Net(lambda net, x: plain(net, (x.mT * net.column).mT))
    net.norm = nn.RMSNorm(D, elementwise_affine=False)
    net.column = nn.Parameter(torch.rand(D, 1) + 0.5)
    apply_strategy(net, strategy, IDS)
    assert net.parametrizations.column[0].vector.alpha.shape == (D,)


def test_apply_strategy_head_used_in_part_noted() -> None:
    net = Net(lambda net, x: F.linear(x, net.head.weight[:8]))
    net.matrix = None
    notes = dict(apply_strategy(net, "hg+dp+or", IDS).notes)
    assert "slices" in notes["head.weight"] and "pass an example" in notes["head.bias"]


@pytest.mark.parametrize("strategy", ["hg", "dp", "ap", "or"])
def test_apply_strategy_layers_without_vectors_noted(strategy: str) -> None:
    layer = nn.TransformerEncoderLayer(D, 2, V, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    post_norm = nn.Sequential(encoder, nn.Linear(D, V))
    twice = Net(lambda net, x: plain(net, NORMS["by hand"](x) * net.gamma))
    twice.gamma = nn.Parameter(torch.ones(D))
    for model, example, noted in (
        (post_norm, torch.randn(2, 8, D), {"0.layers.0.norm1.weight"}),
        (named("olmo2"), None, {"Olmo2ForCausalLM"}),
        (twice, IDS, set()),  # the second norm's matrices have vectors
    ):
        notes = dict(apply_strategy(model, strategy, example).notes)
        assert notes.keys() == (set() if strategy == "or" else noted)


def test_apply_strategy_matrix_over_tokens_keeps_norm() -> None:
    """It sums over as many tokens as there are channels."""
    net = Net(lambda net, x: net.head(net.matrix(x.mT).mT), D)
    report = apply_strategy(net, "hg+dp+or", torch.arange(2 * D).view(2, D) % V)
    assert report.difference < 1e-5 and "norm.parametrizations.weight.0.vector" in report.vectors


# norms without parameters, the paper's `nop` start: the vectors are added
Norm = Callable[[Tensor], Tensor]
NORMS: dict[str, Norm] = {
    "LayerNorm": nn.LayerNorm(D, elementwise_affine=False),
    "rms_norm": lambda x: F.rms_norm(x, (D,)),
    "by hand": lambda x: x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt(),
    "in float32": lambda x: F.layer_norm(x.double(), (D,)).to(x.dtype),
    "normalize": lambda x: F.normalize(x, dim=-1) * D**0.5,
}


class Bare(nn.Module):
    """Two matrices and a head behind norms without parameters; `more` reads the first norm's result
    too."""

    def __init__(
        self, norm: Norm = NORMS["rms_norm"], more: Callable[["Bare", Tensor], Tensor] | None = None
    ):
        super().__init__()
        self.emb = nn.Embedding(V, D)
        self.up = nn.Linear(D, 24)
        self.gate = nn.Linear(D, 24, bias=False)
        self.down = nn.Linear(24, D)
        self.head = nn.Linear(D, V, bias=False)
        self.norm = norm
        self.more = more

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        h = self.norm(x)
        x = x + self.down(F.silu(self.gate(h)) * self.up(h))
        if self.more is not None:
            x = x + self.more(self, h)
        out: Tensor = self.head(self.norm(x))
        return out


def added(model: nn.Module) -> dict[str, set[str]]:
    """Matrix -> its sides that have a vector, the shared one among them."""
    return {
        module.plain_name.removesuffix(".weight"): _sides(module)
        for module in model.modules()
        if isinstance(module, ScaledWeight)
    }


def _sides(weight: ScaledWeight) -> set[str]:
    (part,) = weight.parts
    return {side for side in ("scale_in", "scale_out") if getattr(part, side) is not None}


BOTH = {"scale_in", "scale_out"}
#: the sides of every matrix
EXPECTED: dict[str, set[str]] = {
    "hg+dp+or": BOTH,
    "dp": {"scale_out"},
    "hg+er": {"scale_in"},
    "ap": {"scale_out"},
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("strategy", thinned(EXPECTED, ["dp", "hg+er"]))
def test_apply_strategy_bare_norm_adds_vectors(strategy: str, norm: str) -> None:
    model = Bare(NORMS[norm])
    before = model(IDS)
    report = apply_strategy(model, strategy, IDS)
    sides = EXPECTED[strategy]
    assert added(model) == {"up": sides, "gate": sides, "head": sides}
    assert len(report.vectors) == 3 * len(sides)
    without_vector = {name for name, note in report.notes if "no vector before it" in note}
    assert len(without_vector) == (3 if strategy == "dp" else 0)
    assert torch.equal(model(IDS), before)  # all vectors are 1


@pytest.mark.parametrize("strategy", ["ap", "nop"])
def test_fold_applied_layers_copied_after_the_strategy_train(strategy: str) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.RMSNorm(D), nn.Linear(D, D)) for _ in range(2)))
    model[0][0].weight.requires_grad_(False)
    apply_strategy(model, strategy, torch.randn(2, D))
    model.extend(copy.deepcopy(model))
    fold_applied(nn.Sequential(model))  # which holds it
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert frozen == ["0.0.weight", "2.0.weight"]


def _reads_embedding(model: Bare, h: Tensor) -> Tensor:
    return model.down(model.up(model.emb(IDS)))


OTHERS: dict[str, tuple[Callable[[Bare, Tensor], Tensor], dict[str, set[str]], set[str]]] = {
    "the residual stream": (lambda model, h: h, {"head": BOTH}, {"Bare"}),
    "a matrix of other data": (_reads_embedding, {"gate": BOTH, "head": BOTH}, {"up.weight"}),
}


@pytest.mark.parametrize("case", OTHERS)
def test_apply_strategy_other_readers_limit_vectors(case: str) -> None:
    more, sides, notes = OTHERS[case]
    model = Bare(more=more)
    before = model(IDS)
    report = apply_strategy(model, "hg+dp+or", IDS)
    assert added(model) == sides and dict(report.notes).keys() == notes
    assert torch.equal(model(IDS), before)


def test_apply_strategy_frozen_matrix_vectors_frozen() -> None:
    model = Bare()
    model.up.requires_grad_(False)
    apply_strategy(model, "dp", IDS)
    for name, parameter in model.named_parameters():
        if "scale" in name:
            assert parameter.requires_grad == (not name.startswith("up") or "scale_in" in name)


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def applied(strategy: str = "hg+dp+or") -> Any:
    """A net whose strategy's vectors are not 1."""
    net = Net(plain)
    apply_strategy(net, strategy, IDS)
    perturb(net)
    return net.eval()


def assert_folded(model: nn.Module) -> None:
    """Of its own class, with its own keys but for wrappers', and all of it trains."""
    keys = [key.replace("_orig_mod.", "") for key in model.state_dict()]
    assert keys == list(Net(plain).state_dict())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any("Parametrized" in type(module).__name__ for module in model.modules())


def test_apply_strategy_compiled_parts_and_models_fold() -> None:
    net = applied()
    part = Net(plain)
    with torch.no_grad():
        before = net(IDS)
        net.matrix = compiled(net.matrix)
        net.norm = compiled(net.norm)
        net.head = compiled(net.head)
        assert torch.equal(fold_applied(net)(IDS), before)
    assert_folded(net)
    part.matrix = compiled(part.matrix)
    for model in (part, compiled(Net(plain))):
        apply_strategy(model, "hg+dp+or", IDS)
        assert fold_applied(model) is model
        assert_folded(model)


@pytest.mark.parametrize("frozen", [False, True])
def test_fold_applied_holder_folds_all_models_inside(frozen: bool) -> None:
    nets = nn.ModuleList([applied(), applied()])
    if frozen:
        nets.requires_grad_(False)
    before = [net(IDS) for net in nets]
    assert fold_applied(nets) is nets
    assert all(parameter.requires_grad != frozen for parameter in nets.parameters())
    assert all(torch.equal(net(IDS), expected) for net, expected in zip(nets, before, strict=True))
    with pytest.raises(ValueError, match="has no strategy"):
        fold_applied(nets)


def test_fold_applied_parametrized_again_refused_model_unchanged() -> None:
    net = applied()
    nn.utils.parametrize.register_parametrization(net.head, "weight", nn.Dropout(0.0))
    with unchanged(net), pytest.raises(ValueError, match="head.weight"):
        fold_applied(net)


def test_apply_strategy_warning_as_error_model_unchanged() -> None:
    net = Net(lambda net, x: net.head(torch.tanh(F.linear(x, F.normalize(net.matrix.weight)))), D)
    with unchanged(net), warnings.catch_warnings(), pytest.raises(UserWarning, match="matrix"):
        warnings.simplefilter("error")
        apply_strategy(net, "hg+dp", IDS)
    report = apply_strategy(net, "hg+dp", IDS)
    assert not any(path.startswith("matrix") for path in report.vectors)
    assert "a function of a matrix" in dict(report.notes)["norm.weight"]


@pytest.mark.parametrize("strategy", ["hg+dp+or", "unified"])
def test_apply_strategy_replaced_layer_refused_in_training(strategy: str) -> None:
    """As by resize_token_embeddings of transformers; a wrapped layer still has its vectors."""
    net = applied(strategy)
    net.head = nn.Sequential(net.head)
    net(IDS).sum().backward()
    net.head = nn.Linear(D, V)
    for call in (lambda: net(IDS), lambda: param_groups(net, 1e-3, 0.1, example=IDS)):
        with pytest.raises(ConfigError, match="head.*fold_applied"):
            call()
    with torch.no_grad():
        before = net(IDS)
        if strategy == "hg+dp+or":
            assert torch.equal(fold_applied(net)(IDS), before)


def test_apply_strategy_stage_of_a_pipeline_trains() -> None:
    """Stages are deep copies without the modules of other stages, or with nn.Identity in their
    places."""
    model: Any = named("llama")
    apply_strategy(model, "hg+dp+or")
    ids = torch.arange(4, 20)[None]
    first = copy.deepcopy(model)
    last = copy.deepcopy(model)
    first.model.layers = first.model.layers[:1]
    first.model.norm = nn.Identity()
    first.lm_head = nn.Identity()
    last.model.layers = last.model.layers[1:]
    last.model.embed_tokens = None
    hidden = first(input_ids=ids, use_cache=False).logits
    out = last(inputs_embeds=hidden, use_cache=False).logits
    torch.testing.assert_close(out, model(ids).logits)
    out.square().sum().backward()
    for parameter in (*first.parameters(), *last.parameters()):
        assert parameter.grad is not None or not parameter.requires_grad


def test_apply_strategy_constant_vectors_neither_train_nor_change() -> None:
    for strategy in ("hg+dp", "nop"):
        net = Net(plain)
        plain_state = Net(plain).state_dict()
        apply_strategy(net, strategy, IDS)
        state = copy.deepcopy(net.state_dict())
        with unchanged(net), pytest.raises(ConfigError, match="^norm.weight is"):
            net.load_state_dict(plain_state, strict=False)
        mean = {name: sum(value / 10 for _ in range(10)) for name, value in state.items()}
        net.load_state_dict(mean)
        torch.testing.assert_close(net.norm.weight, state["norm.weight"])
        net.requires_grad_(True)
        for call in (lambda net: net(IDS), lambda net: param_groups(net, 1e-3, 0.1, example=IDS)):
            with pytest.raises(ConfigError, match="^norm.weight.requires_grad is True"):
                call(net)
        net.norm.weight.requires_grad_(False)
        net(IDS).sum().backward()


def test_apply_strategy_unread_original_of_a_kept_vector_must_not_train() -> None:
    net = Net(plain)
    apply_strategy(net, "or", IDS)
    net.requires_grad_(True)
    for call in (lambda net: net(IDS), lambda net: param_groups(net, 1e-3, 0.1, example=IDS)):
        with pytest.raises(ConfigError, match=r"^norm\.parametrizations.*requires_grad is True"):
            call(net)
    net.norm.parametrizations.weight.original.requires_grad_(False)
    net(IDS).sum().backward()
    state = copy.deepcopy(net.state_dict())
    net.load_state_dict(state)
    param_groups(net, 1e-3, 0.1, example=IDS)


def test_apply_strategy_shortest_dtype_sets_rounding() -> None:
    net = Net(lambda net, x: plain(net, x.float().double())).double()
    assert 1e-10 < apply_strategy(net, "hg+ap", IDS).difference < 1e-5
    net = Net(lambda net, x: plain(net, x.bfloat16()))  # weights alone are short
    net.matrix.bfloat16()
    net.head.bfloat16()
    assert apply_strategy(net, "hg+ap", IDS).difference < 0.1


class Speech(nn.Module):
    """A weight norm, a mask token that only training uses, and numbers that are no floats."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(plain)
        self.mask = nn.Parameter(torch.randn(D))
        self.positions = nn.utils.parametrizations.weight_norm(nn.Linear(D, D))
        self.codes = nn.Parameter(torch.arange(2), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.net.emb(ids)
        x = torch.where(ids[..., None] % 2 == 0, self.mask, x) if self.training else x
        return plain(self.net, self.net.norm(x + self.positions(x)))


def test_apply_strategy_unused_special_parameters_accepted() -> None:
    model = Speech()
    report = apply_strategy(model, "hg+dp+or", IDS)
    assert len(report.vectors) == 4 and dict(report.notes).keys() == {"mask"}
    fold_applied(model)
    assert list(model.state_dict()) == list(Speech().state_dict())


class Quantized(Tensor):
    """Stands for DTensor and torchao's tensors."""


def with_zero_gamma() -> Net:
    net = Net(plain)
    nn.init.zeros_(net.norm.weight)
    return net


def with_subclass() -> Net:
    net = Net(plain)
    net.head.weight = nn.Parameter(net.head.weight.detach().as_subclass(Quantized))
    return net


def with_stored_weight() -> Net:
    net = Net(lambda net, x: net.head(F.linear(x, net.stored[0]).tanh()), D)
    net.stored = [net.matrix.weight]
    return net


def with_strategy() -> Net:
    net = Net(plain)
    apply_strategy(net, "nop", IDS)  # which adds no module
    return net


def with_tied_norms() -> nn.Module:
    net = nn.Sequential(nn.Embedding(V, D), nn.RMSNorm(D), nn.Linear(D, D), nn.RMSNorm(D))
    net[3].weight = net[1].weight
    return net.append(nn.Linear(D, V))


def zero_beside_bias() -> nn.Module:
    model: Any = named("gpt2")
    with torch.no_grad():
        model.transformer.h[0].ln_1.weight[3] = 0
        model.transformer.h[0].ln_1.bias[3] = 1
    return model


def with_integers() -> Net:
    net = Net(plain)
    net.head.weight = nn.Parameter(torch.ones(V, D, dtype=torch.int8), requires_grad=False)
    return net


def with_lora() -> Net:
    net = Net(plain)
    net.head = type("Linear", (nn.Linear,), {"__module__": "peft.tuners.lora.layer"})(D, V)
    return net


def parametrized() -> Net:
    net = Net(plain)
    nn.utils.parametrize.register_parametrization(net.norm, "weight", nn.Identity())
    return net


class DistributedDataParallel(nn.Sequential):
    """Stands for torch's, which needs a process group."""


SMALL = BackboneConfig(d_model=32, n_layer=1, n_head=2, vocab_size=V)
#: strategy, part of the message, model
REFUSED: dict[str, tuple[str, str, Callable[[], nn.Module]]] = {
    "sign": ("er", "norm.weight under 'er'", lambda: named("llama")),
    "zero": ("hg", "has a zero entry", zero_beside_bias),
    "Backbone": ("hg", "built with a strategy", lambda: nn.Sequential(Backbone(SMALL))),
    "integer weights": ("hg", "traced forward pass failed", with_integers),
    "LoRA": ("hg", "before PEFT", with_lora),
    "parametrized": ("hg+or", "already parametrized", parametrized),
    "DDP": ("hg", "model inside", lambda: DistributedDataParallel(Net(plain))),
    "no values": ("hg", "without values", lambda: fake_model(lambda: Net(plain))),
    "a reference": ("hg+dp", "layers that read", with_stored_weight),
    "uncalled": ("hg+dnp", "without calling it", lambda: Net(
        lambda net, x: net.head(F.linear(x, net.matrix.weight).tanh()), D)),
    "nan": ("hg", "finite floating-point", lambda: Net(lambda net, x: plain(net, x) * torch.nan)),
    "integers": ("hg", "finite floating-point", lambda: Net(lambda net, x: plain(net, x).argmax(-1))),
    "no norm": ("hg", "Bare has no norm", lambda: Bare(lambda x: x)),
    "zero gamma": ("hg+dp+or", "^norm.weight under", with_zero_gamma),
    "subclass of a tensor": ("hg+dp", "^head.weight is a Quantized", with_subclass),
    "tied norms": ("or", "^1.weight is tied", with_tied_norms),
    "applied": ("hg+dp+or", "fold_applied", with_strategy),
    "expert without tokens": ("hg", r"reached experts\.1", lambda: Experts()),
}  # fmt: skip


class Experts(Net):
    """Two experts, of which the tokens reach the first."""

    def __init__(self) -> None:
        super().__init__(lambda net, x: plain(net, x) + net.experts[0](x))
        self.experts = nn.ModuleList(nn.Linear(D, V) for _ in range(2))


@pytest.mark.parametrize("name", REFUSED)
def test_apply_strategy_unfit_model_refused_unchanged(name: str) -> None:
    strategy, why, build = REFUSED[name]
    model = build()
    with (
        unchanged(model, values=name not in ("nan", "no values")),
        pytest.raises(ConfigError, match=why),
    ):
        apply_strategy(model, strategy, IDS)


def _function_of_parameter(part: Any, x: Tensor) -> Tensor:
    return plain(part, F.rms_norm(x, (D,)) * (2 * part.g))


def _convolution_and_itself(part: Any, x: Tensor) -> Tensor:
    kernel = torch.stack([part.g, -part.g], -1)[:, None]
    return plain(part, x + F.conv1d(x.mT, kernel, padding=1, groups=D).mT[:, : x.shape[1]])


def _matrix_of_two_norms(part: Any, x: Tensor) -> Tensor:
    return plain(part, x) + plain(part, F.rms_norm(x.tanh(), (D,)))


def _stacked(part: Any, x: Tensor) -> Tensor:
    y, z = torch.einsum("btd,nfd->nbtf", x, part.stack).unbind()
    return plain(part, x) + part.head(y * z)


#: reads of a norm's output by a part, and the outputs of its matrix
READS: dict[str, tuple[Callable[[Any, Tensor], Any], int]] = {
    "plain": (plain, V),
    "function of a matrix": (lambda p, x: p.head(x) * F.linear(x, F.normalize(p.matrix.weight)), V),
    "convolution": (lambda p, x: p.head(x) * F.conv1d(x.mT, p.matrix.weight[..., None]).mT, V),
    "function of a parameter": (_function_of_parameter, V),
    "convolution and itself": (_convolution_and_itself, V),
    "matrix of two norms": (_matrix_of_two_norms, V),
    "stacked": (_stacked, V),
    "tied table": (lambda p, x: plain(p, x) * F.linear(x, p.stored[1]), V),
    "stored reference": (lambda p, x: p.head(F.linear(x, p.stored[0]).tanh()), D),
    "returned": (lambda p, x: (plain(p, x), x), V),
}
for _name, (_read, _matrices, _) in FUSED.items():
    READS[f"fused, {_name}"] = _read, _matrices * D
for _name, (_read, _outputs, _) in ONE.items():
    READS[f"one, {_name}"] = _read, _outputs


def _read_added(added: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Any]:
    return lambda part, x: plain(part, added(part, x))


for _name, _added in ADDED.items():
    READS[f"added, {_name}"] = _read_added(_added), V


class Part(nn.Module):
    """Matrices and other parameters that one read of a norm's output may use."""

    def __init__(self, name: str, table: Tensor):
        super().__init__()
        self.read, width = READS[name]
        self.matrix = nn.Linear(D, width, bias=False)
        self.head = nn.Linear(D, V)
        self.bias = nn.Parameter(torch.randn(D))
        self.g = nn.Parameter(torch.randn(D))
        self.table = nn.Parameter(torch.randn(8, D), requires_grad=False)
        self.stack = nn.Parameter(torch.randn(2, D, D), requires_grad=False)
        self.stored = [self.matrix.weight, table]

    def forward(self, x: Tensor) -> Any:
        return self.read(self, x)


class Parts(nn.Module):
    """Several parts that read the output of one norm."""

    def __init__(self, reads: list[str], norm: Callable[[Tensor], Tensor]):
        super().__init__()
        self.emb = nn.Embedding(V, D)
        self.norm = norm
        parts = [Part(name, self.emb.weight) for name in reads]
        self.parts = nn.ModuleDict(zip("abc", parts, strict=False))  # numbers would be layers

    def forward(self, ids: Tensor) -> Any:
        x = self.norm(self.emb(ids))
        return [part(x) for part in self.parts.values()]


def trained_norm(kind: type[nn.Module]) -> nn.Module:
    """Return a norm whose vector and bias have left their start."""
    norm = kind(D)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm


TRAINED = {"RMSNorm": nn.RMSNorm, "LayerNorm with a bias": nn.LayerNorm}
STRATEGIES = ["hg+dp+or+iwd", "hg+ap", "hg+er", "shared+dp+or", "or", "dp", "ap", "nop", "llama"]


@given(
    st.lists(st.sampled_from(sorted(READS)), min_size=1, max_size=3),
    st.sampled_from([*TRAINED, *NORMS]),
    st.sampled_from(STRATEGIES),
)
@settings(max_examples=60, deadline=None)
def test_apply_strategy_any_reads_same_outputs_or_refused_unchanged(
    reads: list[str], norm: str, strategy: str
) -> None:
    torch.manual_seed(0)
    model = Parts(reads, trained_norm(TRAINED[norm]) if norm in TRAINED else NORMS[norm]).double()
    before = model(IDS)
    start = copy.deepcopy(model.state_dict())
    trains = [parameter.requires_grad for parameter in model.parameters()]
    try:
        apply_strategy(model, strategy, IDS)
    except ConfigError as error:
        has_reason = strategy == "hg+er" or "stored reference" in reads
        assert has_reason or "has no norm" in str(error)
        torch.testing.assert_close(model.state_dict(), start, rtol=0, atol=0)
        assert [parameter.requires_grad for parameter in model.parameters()] == trains
        return

    torch.testing.assert_close(model(IDS), before)
    perturb(model)
    applied = model(IDS)
    torch.testing.assert_close(fold_applied(model)(IDS), applied)
    assert list(model.state_dict()) == list(start)
    apply_strategy(model, strategy, IDS)
    torch.testing.assert_close(model(IDS), applied)


def test_apply_strategy_batch_norm_keeps_outputs() -> None:
    """Its factor moves into the matrix; statistics and bias stay in the norm."""
    model = nn.Sequential(nn.BatchNorm1d(D), nn.Linear(D, V)).double().eval()
    features = torch.randn(4, D).double()
    with torch.no_grad():
        for tensor in (*model[0].parameters(), *model[0].buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) + 0.5)
    before = model(features)

    report = apply_strategy(model, "hg+dp+or", features)
    assert len(report.vectors) == 2
    torch.testing.assert_close(model(features), before)
    torch.testing.assert_close(fold_applied(model)(features), before)
