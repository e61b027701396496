"""A strategy on models written by hand, where what is not seen in time would change them without a word."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sv.interop import Report, apply_strategy, fold_applied

pytestmark = pytest.mark.filterwarnings("ignore:.*scale vectors; the function is:UserWarning")
D, V = 16, 32
IDS = torch.arange(16).view(2, 8) % V
Read = Callable[["Net", Tensor], Any]


class Net(nn.Module):
    """An embedding, a norm with a trained gamma, a matrix and a head; what is done with them is `read`."""

    def __init__(self, read: Read, width: int = V):
        super().__init__()
        self.emb, self.norm = nn.Embedding(V, D), nn.RMSNorm(D)
        self.matrix, self.head = nn.Linear(D, width, bias=False), nn.Linear(D, V)
        self.read = read
        with torch.no_grad():
            self.norm.weight += 0.3 * torch.randn(D)

    def forward(self, ids: Tensor) -> Any:
        """Ids -> what `read` makes of the normalized input."""
        return self.read(self, self.norm(self.emb(ids)))


def plain(net: Net, x: Tensor) -> Tensor:
    out: Tensor = net.head(x) * torch.sigmoid(net.matrix(x))
    return out


@pytest.mark.parametrize("wrap", [nn.DataParallel, type("FullyShardedDataParallel", (nn.Sequential,), {})])
def test_what_shares_a_model_among_processes_goes_around_it(wrap: Any) -> None:
    with pytest.raises(ValueError, match="inside"):
        apply_strategy(wrap(Net(plain)), "hg+dp", IDS)


def test_a_table_that_a_function_ties_has_no_vectors() -> None:
    net = Net(lambda net, x: F.linear(x, net.emb.weight) * plain(net, x))
    report = apply_strategy(net, "hg+dp", IDS)
    assert "no vector after it" in dict(report.notes)["emb.weight"]
    assert not any(path.startswith("emb") for path in report.vectors)


@dataclasses.dataclass(slots=True)
class Slots:
    """An output that keeps its tensors in slots."""

    logits: Tensor


def _padded(value: float) -> Read:
    def read(net: Net, x: Tensor) -> Tensor:
        return plain(net, x).masked_fill(torch.arange(V) >= V - 4, value)

    return read


OUTPUTS: dict[str, Read] = {
    "slots": lambda net, x: Slots(plain(net, x)),
    "a dataclass in a tuple": lambda net, x: (0, Slots(plain(net, x))),
    "the lowest number": _padded(torch.finfo(torch.float32).min),
    "-inf": _padded(-torch.inf),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_the_outputs_are_compared_whatever_they_come_in(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report = apply_strategy(Net(OUTPUTS[name]), "hg+dp+or", IDS)
    assert len(report.vectors) == 4
    assert 0 < report.difference < 1e-5  # 0 would be of nothing compared
    monkeypatch.setattr("lightning_sv.interop.apply.plan.Planner._columns", lambda self, reader, gamma: torch.zeros(()))
    with pytest.raises(ValueError, match="Net"):
        apply_strategy(Net(OUTPUTS[name]), "ap", IDS)


def test_a_model_without_numbers_cannot_be_checked() -> None:
    with pytest.raises(ValueError, match="expected floating-point numbers"):
        apply_strategy(Net(lambda net, x: plain(net, x).argmax(-1)), "hg", IDS)


def test_the_shortest_dtype_says_what_is_rounding() -> None:
    net = Net(lambda net, x: plain(net, x.bfloat16()))
    for module in (net.matrix, net.head):
        module.bfloat16()
    assert apply_strategy(net, "hg+ap", IDS).difference < 0.1


def test_what_is_frozen_stays_frozen() -> None:
    net = Net(plain)
    net.matrix.requires_grad_(False)
    apply_strategy(net, "hg+dp+or", IDS)
    trains = {name: parameter.requires_grad for name, parameter in net.named_parameters()}
    behind = {trains[name] for name in trains if name.startswith("matrix") and "scale_out" in name}
    before = {trains[name] for name in trains if name.startswith("matrix") and "scale_in" in name}
    assert behind == {False} and before == {True}  # gamma_in is the norm's, which trains
    assert {trains[name] for name in trains if name.startswith("head") and "scale" in name} == {True}


def test_of_a_branch_that_only_training_reaches_the_roles_are_given() -> None:
    class Ahead(Net):
        def __init__(self) -> None:
            super().__init__(plain)
            self.ahead = nn.Linear(D, V, bias=False)

        def forward(self, ids: Tensor) -> Any:
            out = super().forward(ids)
            return (out, self.ahead(self.norm(self.emb(ids)))) if self.training else out

    with pytest.raises(ValueError, match=r"known=\{'ahead.weight'"):
        apply_strategy(Ahead(), "hg+dp", IDS)
    report = apply_strategy(Ahead(), "hg+dp", IDS, known={"ahead.weight": "head"})
    assert dict(report.notes).keys() == {"ahead.weight"}


def test_a_function_of_a_matrix_takes_no_vector_up() -> None:
    net = Net(lambda net, x: net.head(torch.tanh(F.linear(x, F.normalize(net.matrix.weight, dim=-1)))), D)
    report = apply_strategy(net, "hg+dp", IDS)
    assert not any(path.startswith("matrix") for path in report.vectors)
    assert "a function of a matrix" in dict(report.notes)["norm.weight"]


def test_dnp_needs_layers_that_are_called() -> None:
    net = Net(lambda net, x: net.head(torch.tanh(F.linear(x, net.matrix.weight))), D)
    before = net(IDS)
    with pytest.raises(ValueError, match=r"without calling it.*matrix: dp"):
        apply_strategy(net, "hg+dnp", IDS)
    assert torch.equal(net(IDS), before)


def _stacked(net: Net, x: Tensor) -> Tensor:
    q, k, v = net.matrix(x).view(2, 8, 3, 2, D // 2).permute(2, 0, 3, 1, 4).unbind(0)
    out: Tensor = net.head(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    return out


def _in_heads(net: Net, x: Tensor) -> Tensor:
    q, k, v = net.matrix(x).view(2, 8, 2, 3, D // 2).permute(3, 0, 2, 1, 4).unbind(0)
    out: Tensor = net.head(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    return out


@pytest.mark.parametrize(
    ("read", "width", "parts"),
    [
        (lambda net, x: net.head(F.glu(net.matrix(x))), 2 * D, 2),
        (lambda net, x: net.head(torch.mul(*net.matrix(x).unflatten(-1, (2, D)).unbind(-2))), 2 * D, 2),
        (_stacked, 3 * D, 3),
        (_in_heads, 3 * D, 1),
    ],
    ids=["glu", "unflatten", "q, k and v one after the other", "q, k and v of each head"],
)
def test_matrices_stored_in_one_have_vectors_of_their_own(read: Read, width: int, parts: int) -> None:
    report = apply_strategy(Net(read, width), "hg+dp", IDS)
    assert sum(path.startswith("matrix") for path in report.vectors) == (
        2 * parts if parts > 1 else 1
    )  # one alone keeps gamma_in in its norm
    assert _partial(report) == (parts == 1)


def _partial(report: Report) -> bool:
    return any("hg is partial" in note for _, note in report.notes)


def test_what_no_matrix_can_take_up_is_said() -> None:
    class Convolved(Net):
        def __init__(self) -> None:
            super().__init__(lambda net, x: net.head(torch.tanh(net.conv(x.mT).mT)))
            self.conv = nn.Conv1d(D, D, 1)
            del self.matrix

    report = apply_strategy(Convolved(), "hg+ap", IDS)
    assert "remains one vector of its norm" in dict(report.notes)["norm.weight"]


def test_folding_gives_the_parameters_back_in_their_order() -> None:
    class Normed(nn.Module):
        def __init__(self, d_out: int) -> None:
            super().__init__()
            self.gamma = nn.Parameter(1 + 0.1 * torch.randn(D))
            self.first, self.second = (nn.Parameter(torch.randn(d_out, D) / 4) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x = F.rms_norm(x, (D,), self.gamma)
            return F.linear(x, self.first) * torch.sigmoid(F.linear(x, self.second))

    net = nn.Sequential(nn.Embedding(V, D), Normed(D), Normed(V))
    names, before = [name for name, _ in net.named_parameters()], net(IDS)
    apply_strategy(net, "hg+dp+or", IDS)
    fold_applied(net)
    assert [name for name, _ in net.named_parameters()] == names
    torch.testing.assert_close(net(IDS), before, rtol=1e-5, atol=1e-6)


def test_the_bias_of_a_norm_is_what_is_added_to_it_whatever_its_name() -> None:
    class Fused(nn.Module):  # `bias` is the matrix's
        def __init__(self) -> None:
            super().__init__()
            self.gamma, self.bias = nn.Parameter(1 + 0.3 * torch.randn(D)), nn.Parameter(torch.randn(D))
            self.weight = nn.Parameter(torch.randn(D, D) / 4)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(F.rms_norm(x, (D,), self.gamma), self.weight, self.bias)

    class Short(Fused):  # `bias` is the norm's, and not called so
        def __init__(self) -> None:
            super().__init__()
            self.b = self.bias
            del self.bias

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(F.layer_norm(x, (D,), self.gamma, self.b), self.weight)

    for layer in (Fused(), Short()):
        net = nn.Sequential(nn.Embedding(V, D), layer, nn.Tanh(), nn.Linear(D, V))
        report = apply_strategy(net, "hg+ap", IDS)
        assert report.difference < 1e-5 and report.vectors == ("1.parametrizations.weight.0.parts.0.scale_out",)


@pytest.mark.parametrize(
    "gamma",
    [lambda net: net.g.exp(), lambda net: 2 * net.g, lambda net: net.g.square()],
    ids=["exp", "twice", "square"],
)
def test_a_gamma_that_is_another_function_is_left_as_it_is(gamma: Callable[[Any], Tensor]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.head, self.g = nn.Embedding(V, D), nn.Linear(D, V), nn.Parameter(torch.randn(D))

        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = self.head(F.rms_norm(self.emb(ids), (D,)) * gamma(self))
            return out

    report = apply_strategy(Net(), "or", IDS)
    assert report.vectors == ()
    assert dict(report.notes) == {"g": "unchanged, because its norm multiplies by neither w nor 1 + w"}
