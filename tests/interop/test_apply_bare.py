"""Strategies on models whose norms have no parameters, the paper's `nop` start: the vectors are added."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sv.interop import apply_strategy, fold_applied, param_groups
from lightning_sv.interop.apply.weights import ScaledWeight
from tests.interop.test_apply import logits, named, perturb
from tests.interop.test_apply_by_hand import IDS, D, V

pytestmark = pytest.mark.filterwarnings("ignore:.*scale vectors; the function is:UserWarning")
Norm = Callable[[Tensor], Tensor]
NORMS: dict[str, Norm] = {
    "LayerNorm": nn.LayerNorm(D, elementwise_affine=False),
    "RMSNorm": nn.RMSNorm(D, elementwise_affine=False),
    "rms_norm": lambda x: F.rms_norm(x, (D,)),
    "by hand": lambda x: x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt(),
    "in float32": lambda x: F.layer_norm(x.double(), (D,)).to(x.dtype),
}


class Bare(nn.Module):
    """Two matrices and a head behind norms without parameters; `more` reads the first norm's result too."""

    def __init__(self, norm: Norm = NORMS["rms_norm"], more: Callable[["Bare", Tensor], Tensor] | None = None):
        super().__init__()
        self.emb, self.up, self.gate = nn.Embedding(V, D), nn.Linear(D, 24), nn.Linear(D, 24, bias=False)
        self.down, self.head = nn.Linear(24, D), nn.Linear(D, V, bias=False)
        self.norm, self.more = norm, more

    def forward(self, ids: Tensor) -> Tensor:
        """Ids -> logits."""
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
        module.site.removesuffix(".weight"): {
            side for side in ("scale_in", "scale_out") for part in module.parts if getattr(part, side) is not None
        }
        for module in model.modules()
        if isinstance(module, ScaledWeight)
    }


BOTH = {"scale_in", "scale_out"}
EXPECTED: dict[str, tuple[set[str], int]] = {  # the sides of every matrix, and how many vectors that makes
    "hg+dp+or": (BOTH, 6),
    "dp": (BOTH, 5),
    "llama": ({"scale_in"}, 2),
    "hg+er": ({"scale_in"}, 3),
    "ap": ({"scale_out"}, 3),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("strategy", EXPECTED)
def test_matrices_behind_a_norm_get_vectors_and_folding_takes_them_away(strategy: str, norm: str) -> None:
    model = Bare(NORMS[norm])
    keys, before = list(model.state_dict()), model(IDS)
    report = apply_strategy(model, strategy, IDS)
    sides, count = EXPECTED[strategy]
    assert added(model) == {"up": sides, "gate": sides, "head": sides} and len(report.vectors) == count
    assert torch.equal(model(IDS), before) and not report.notes  # all vectors are 1
    perturb(model)
    assert not torch.allclose(model(IDS), before)
    applied, copied = model(IDS), copy.deepcopy(model)
    assert torch.equal(fold_applied(model)(IDS), applied) and list(model.state_dict()) == keys
    assert torch.equal(copied(IDS), applied)  # of vectors of its own


def test_a_vector_that_matrices_share_is_stored_once_and_trains_for_all() -> None:
    model = Bare()
    apply_strategy(model, "llama", IDS)
    (name,) = [name for name in model.state_dict() if "scale_in" in name and "head" not in name]
    other = Bare()
    apply_strategy(other, "llama", IDS)
    perturb(model)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(IDS), model(IDS))
    plain = Bare()
    apply_strategy(plain, "llama", IDS)
    plain(IDS).square().sum().backward()
    weights = [plain.get_parameter(f"{matrix}.parametrizations.weight.original") for matrix in ("up", "gate")]
    expected = sum((weight * weight.grad).sum(0) for weight in weights)  # gamma is 1
    torch.testing.assert_close(plain.get_parameter(name).grad, expected)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(IDS), model(IDS))
    decayed = {id(p) for group in param_groups(model, 1e-3, 0.1, "iwd", IDS)[:1] for p in group["params"]}
    assert id(model.get_parameter(name)) in decayed


def _reads_embedding(model: Bare, h: Tensor) -> Tensor:
    return model.down(model.up(model.emb(IDS)))


def _reads_both_norms(model: Bare, h: Tensor) -> Tensor:
    return model.down(model.up(model.norm(model.emb(IDS).square())))


OTHERS: dict[str, tuple[Callable[[Bare, Tensor], Tensor], dict[str, set[str]], set[str]]] = {
    "the residual stream": (lambda model, h: h, {"head": BOTH}, set()),
    "a function": (lambda model, h: torch.tanh(h), {"head": BOTH}, set()),
    "a matrix of other data": (_reads_embedding, {"gate": BOTH, "head": BOTH}, {"up.weight"}),
    "a matrix of two norms": (_reads_both_norms, {"up": BOTH, "gate": BOTH, "head": BOTH}, set()),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_else_reads_a_norm_decides_where_vectors_can_be(case: str) -> None:
    more, sides, notes = OTHERS[case]
    model = Bare(more=more)
    before = model(IDS)
    report = apply_strategy(model, "hg+dp+or", IDS)
    assert added(model) == sides and dict(report.notes).keys() == notes
    assert torch.equal(model(IDS), before)


def test_a_model_without_norms_is_refused() -> None:
    with pytest.raises(ValueError, match="Bare has no norm"):
        apply_strategy(Bare(lambda x: x), "hg", IDS)


def test_a_tied_head_gets_vectors_when_it_is_untied() -> None:
    model = Bare()
    model.head.weight = model.emb.weight
    report = apply_strategy(model, "hg+dp", IDS)
    assert "head" not in added(model) and dict(report.notes).keys() == {"emb.weight"}
    fold_applied(model)
    apply_strategy(model, "hg+dp", IDS, untie_head=True)
    assert added(model)["head"] == BOTH


def test_what_is_frozen_stays_frozen_and_one_trained_matrix_trains_what_it_shares() -> None:
    model = Bare()
    model.up.requires_grad_(False)
    apply_strategy(model, "dp", IDS)
    trains = {name: parameter.requires_grad for name, parameter in model.named_parameters() if "scale" in name}
    assert trains == {name: not ("up" in name and "scale_out" in name) for name in trains}


@pytest.mark.parametrize(("family", "words"), [
    ("olmo", {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head"}),
    ("nanochat", {"q_proj", "k_proj", "v_proj", "fc1", "lm_head"}),
])  # fmt: skip
def test_published_models_without_vectors_get_those_of_the_paper(family: str, words: set[str]) -> None:
    model = named(family)
    before = logits(model)
    report = apply_strategy(model, "hg+dp+or+iwd")
    assert torch.equal(logits(model), before) and report.difference == 0 and not report.notes
    assert {name.rpartition(".")[2] for name in added(model)} == words
    assert all(sides == BOTH for sides in added(model).values())
