"""Apply and fold are planned before anything is changed: all of it, or nothing."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sv.interop import apply_strategy, fold_applied, param_groups
from tests.interop.test_apply import named, perturb, state
from tests.interop.test_apply_by_hand import IDS, D, Net, plain

pytestmark = pytest.mark.filterwarnings("ignore:.*scale vectors; the function is:UserWarning")


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def applied(net: nn.Module | None = None, strategy: str = "hg+dp+or") -> Any:
    """A net whose strategy's vectors are not 1."""
    net = Net(plain) if net is None else net
    apply_strategy(net, strategy, IDS)
    perturb(net)
    return net.eval()


def assert_folded(model: nn.Module, *, trains: bool = True) -> None:
    """Of its own class, with its own keys but for wrappers', and all of it trains."""
    keys = [key.replace("_orig_mod.", "") for key in model.state_dict()]
    assert keys == list(Net(plain).state_dict())
    assert all(parameter.requires_grad for parameter in model.parameters()) or not trains
    assert not any("Parametrized" in type(module).__name__ for module in model.modules())


class Forwarding(nn.Module):
    """A wrapper that gives all the attributes of what it wraps, as torch.compile's does."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        """Its own attributes, then those of the inner module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any) -> Any:
        """Call the inner module."""
        return self.inner(*args)


@pytest.mark.parametrize("wrap", [compiled, Forwarding], ids=["compile", "forwarding"])
@pytest.mark.parametrize("name", ["matrix", "norm", "head"])
def test_a_part_that_was_wrapped_after_apply_folds(name: str, wrap: Callable[[nn.Module], Any]) -> None:
    net = applied()
    with torch.no_grad():
        before = net(IDS)
        setattr(net, name, wrap(getattr(net, name)))
        fold_applied(net)
        assert torch.equal(net(IDS), before)
    if wrap is compiled:
        assert_folded(net)


def test_a_compiled_model_or_part_takes_a_strategy_and_gives_it_back() -> None:
    net = Net(plain)
    net.matrix = compiled(net.matrix)
    for model in (net, compiled(Net(plain))):
        apply_strategy(model, "hg+dp+or", IDS)
        assert fold_applied(model) is model
        assert_folded(model)


def test_all_models_that_a_module_holds_fold() -> None:
    nets = nn.ModuleList([applied(), applied()]).requires_grad_(False)
    before = [net(IDS) for net in nets]
    assert fold_applied(nets) is nets
    for net, expected in zip(nets, before, strict=True):
        assert_folded(net, trains=False)
        assert not any(parameter.requires_grad for parameter in net.parameters())  # what holds them decides that
        assert torch.equal(net(IDS), expected)
        apply_strategy(net, "hg", IDS)
    with pytest.raises(ValueError, match="fold_applied"):
        apply_strategy(nn.Sequential(*nets), "hg", IDS)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def _again(net: Net) -> str:
    nn.utils.parametrize.register_parametrization(net.head, "weight", Doubled())
    return "head.weight"


def _failing(net: Net) -> str:
    def fail(*args: Any) -> None:
        raise ValueError("head.weight")

    net.head.get_submodule("parametrizations.weight.0").register_forward_hook(fail)
    return "head.weight"


@pytest.mark.parametrize("spoil", [_again, _failing])
def test_a_fold_that_is_refused_changes_nothing(spoil: Callable[[Net], str]) -> None:
    net = applied()
    name = spoil(net)
    before, kinds = state(net), [type(module) for module in net.modules()]
    trains = [parameter.requires_grad for parameter in net.parameters()]
    with pytest.raises(ValueError, match=name):
        fold_applied(net)
    assert list(net.state_dict()) == list(before)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert [type(module) for module in net.modules()] == kinds
    assert [parameter.requires_grad for parameter in net.parameters()] == trains


def test_a_warning_that_is_an_error_leaves_the_model_as_it_was() -> None:
    net = Net(lambda net, x: net.head(torch.tanh(F.linear(x, F.normalize(net.matrix.weight)))), D)
    before = list(net.state_dict())
    with warnings.catch_warnings(), pytest.raises(UserWarning, match="norm.weight"):
        warnings.simplefilter("error")
        apply_strategy(net, "hg+dp", IDS)
    assert list(net.state_dict()) == before
    assert all(parameter.requires_grad for parameter in net.parameters())


def test_vectors_that_a_new_module_would_lose_are_refused_and_folding_keeps_the_function() -> None:
    model, ids = named("llama"), torch.arange(4, 20)[None]
    apply_strategy(model, "hg+dp+or")
    perturb(model)
    with torch.no_grad():
        before = model(ids).logits
    model.resize_token_embeddings(80, mean_resizing=False)
    for call in (lambda: model(ids), lambda: param_groups(model, 1e-3, 0.1)):
        with pytest.raises(ValueError, match=r"lm_head.weight.*fold_applied"):
            call()
    with torch.no_grad():
        assert torch.equal(fold_applied(model)(ids).logits[..., :64], before)
    assert any(name.startswith("lm_head") for name in apply_strategy(model, "hg+dp+or").vectors)
    model(ids).logits.sum().backward()


def test_a_layer_that_is_wrapped_keeps_its_vectors_and_one_with_a_norm_loses_them() -> None:
    net = applied()
    net.head = nn.Sequential(net.head)
    net(IDS).sum().backward()
    net = applied(strategy="unified")
    net.head = nn.Linear(D, net.head.out_features)
    with pytest.raises(ValueError, match="head"):
        net(IDS)


def _mixed_dtypes(net: Net, x: Tensor) -> Tensor:
    return plain(net, x.float().double())


def _written_in_place(net: Net, x: Tensor) -> Tensor:
    return plain(net, torch.empty(x.shape, dtype=torch.bfloat16).copy_(x).double())


@pytest.mark.parametrize("read", [_mixed_dtypes, _written_in_place])
def test_the_shortest_dtype_of_the_pass_says_what_is_rounding(read: Callable[[Net, Tensor], Tensor]) -> None:
    difference = apply_strategy(Net(read).double(), "hg+ap", IDS).difference
    assert 1e-10 < difference < (1e-5 if read is _mixed_dtypes else 0.1)
    net = Net(lambda net, x: plain(net, x.bfloat16()))  # weights alone are short
    net.matrix.bfloat16()
    net.head.bfloat16()
    assert apply_strategy(net, "hg+ap", IDS).difference < 0.1


class Speech(nn.Module):
    """What refused all strategies: a weight norm, a mask token that only training uses, numbers that are no floats."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.mask = Net(plain), nn.Parameter(torch.randn(D))
        self.positions = nn.utils.parametrizations.weight_norm(nn.Linear(D, D))
        self.codes = nn.Parameter(torch.arange(2), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Ids -> logits, with a mask in training."""
        x = self.net.emb(ids)
        x = torch.where(ids[..., None] % 2 == 0, self.mask, x) if self.training else x
        return plain(self.net, self.net.norm(x + self.positions(x)))


def test_what_is_not_planned_refuses_nothing() -> None:
    model = Speech()
    report = apply_strategy(model, "hg+dp+or", IDS)
    assert len(report.vectors) == 4 and dict(report.notes).keys() == {"mask"}
    fold_applied(model)
    assert list(model.state_dict()) == list(Speech().state_dict())


def test_a_refusal_names_the_vector_and_a_line_that_helps() -> None:
    net = Net(plain)
    nn.init.zeros_(net.norm.weight)
    with pytest.raises(ValueError, match=r"^norm.weight .*constant_") as refused:
        apply_strategy(net, "hg+dp+or", IDS)
    exec(str(refused.value).rpartition("near 0: ")[2].rstrip("."), {"torch": torch, "model": net})
    apply_strategy(net, "hg+dp+or", IDS)
