"""Parameterizations: formulas and inverses; those that violate the contract are refused before
training."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_sv.errors import ConfigError
from lightning_sv.nn import Backbone
from lightning_sv.nn.config import BackboneConfig
from lightning_sv.optim.groups import role_groups
from lightning_sv.scale import (
    DirectScale,
    ExponentialScale,
    OriginalSpaceScale,
    ScaleVector,
)
from lightning_sv.scale.strategy import PARAMETERIZATIONS
from lightning_sv.scale.validate import check_parameterization
from lightning_sv.scale.vector import HeadShared

EVERY = pytest.mark.parametrize("kind", list(PARAMETERIZATIONS.values()))


@EVERY
@pytest.mark.parametrize("batch_dims", [(), (3,)])
@pytest.mark.parametrize("d", [1, 5, 768, 853])
def test_scale_vector_new_or_reset_is_exactly_one(
    kind: type[ScaleVector], batch_dims: tuple[int, ...], d: int
) -> None:
    vector = kind(d, "input", batch_dims)
    assert torch.equal(vector(), torch.ones(*batch_dims, d))
    with torch.no_grad():
        for parameter in vector.parameters():
            parameter.add_(0.5)
    vector.reset_parameters()
    assert torch.equal(vector(), torch.ones(*batch_dims, d))


@EVERY
@given(values=st.lists(st.floats(0.01, 100.0), min_size=2, max_size=8))
def test_set_gamma_is_the_inverse_of_forward(kind: type[ScaleVector], values: list[float]) -> None:
    gamma = torch.tensor(values, dtype=torch.float64)
    vector = kind(len(values), "output").double()
    vector.set_gamma(gamma)
    torch.testing.assert_close(vector(), gamma, rtol=1e-12, atol=0)


def test_set_gamma_sets_alpha_and_beta_as_documented() -> None:
    """Weight decay and learning speed depend on them, not on gamma alone."""
    gamma = torch.tensor([0.5, 2.0, 4.0, 1.0], dtype=torch.float64)
    r = OriginalSpaceScale(4, "input").double()
    e = ExponentialScale(4, "input").double()
    for vector in (r, e):
        vector.set_gamma(gamma)
    torch.testing.assert_close(r.alpha.detach(), gamma)
    torch.testing.assert_close(r.beta.detach(), gamma.norm().view(1) / 2)
    torch.testing.assert_close(e.beta.detach(), gamma.log().mean().view(1))
    torch.testing.assert_close(e.alpha.detach(), gamma.log() - gamma.log().mean())


def test_set_gamma_not_representable_refused() -> None:
    with pytest.raises(ValueError, match="'or' cannot represent a zero"):
        OriginalSpaceScale(3, "input").set_gamma(torch.zeros(3))
    for entry in (0.0, -1.0):
        with pytest.raises(ValueError, match="'er' cannot represent"):
            ExponentialScale(3, "input").set_gamma(torch.tensor([1.0, entry, 2.0]))
    DirectScale(3, "input").set_gamma(torch.zeros(3))
    vector = HeadShared(DirectScale(3, "output"), 2)
    vector.set_gamma(torch.tensor([1.0, 2, 3, 1, 2, 3]))
    assert vector().tolist() == [1, 2, 3, 1, 2, 3] and vector.vector.gamma.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="share_heads"):
        vector.set_gamma(torch.arange(6.0))


class Softplus(ScaleVector):
    def __init__(self, d: int, role: str, batch_dims: Sequence[int] = ()):
        super().__init__(d, role, batch_dims)
        self.w = nn.Parameter(torch.zeros(*self.batch_dims, d))

    def forward(self) -> Tensor:
        return nn.functional.softplus(self.w)

    @torch.no_grad()
    def set_gamma(self, gamma: Tensor) -> None:
        self.w.copy_(torch.expm1(gamma).log())


class Tanh(Softplus):
    def forward(self) -> Tensor:
        return 1 + self.w.tanh()


@pytest.mark.parametrize("names", [("or", "er"), ("or", "ExpOr"), ("Softplus", "Tanh")])
def test_state_of_one_parameterization_is_refused_by_another(
    names: tuple[str, str], tmp_path: Path
) -> None:
    """Although their parameters have equal names and shapes."""
    classes = PARAMETERIZATIONS | {"ExpOr": ExpOr, "Softplus": Softplus, "Tanh": Tanh}
    for name, other_name in (names, names[::-1]):
        kind = classes[name]
        model = nn.Sequential(kind(3, "input"))
        other = nn.Sequential(classes[other_name](3, "input"))
        torch.save(model.state_dict(), tmp_path / name)
        state: Any = torch.load(tmp_path / name, weights_only=True)
        # as fully_shard makes it
        sharded = type("Sharded", (kind,), {"__module__": "torch.distributed.fsdp"})
        for target in (model, nn.Sequential(sharded(3, "input"))):
            target.load_state_dict(state)
        with pytest.raises(ConfigError, match="parameterization of 0"):
            other.load_state_dict(state)

        other.load_state_dict(dict(state))  # without the record, as in safetensors


class LowRank(Softplus):
    def set_gamma(self, gamma: Tensor) -> None:
        if (gamma != 1).any():
            raise ValueError("a low-rank gamma cannot be this one")
        super().set_gamma(gamma)


class Copies(Softplus):
    @torch.no_grad()
    def set_gamma(self, gamma: Tensor) -> None:
        self.w.copy_(gamma)


class Detached(Softplus):
    def forward(self) -> Tensor:
        return nn.functional.softplus(self.w.detach())


class OneForAll(Softplus):
    def __init__(self, d: int, role: str, batch_dims: Sequence[int] = ()):
        super().__init__(d, role)
        self.batch_dims = tuple(batch_dims)

    @torch.no_grad()
    def set_gamma(self, gamma: Tensor) -> None:
        self.w.copy_(torch.expm1(gamma.flatten(0, -2)[0] if gamma.ndim > 1 else gamma).log())


class Constant(Softplus):
    def __init__(self, *args: Any):
        super().__init__(*args)
        self.register_buffer("fixed", torch.full((self.d,), 0.5))


class Composed(ScaleVector):
    """2 g - 0.5, where g is a vector of its own."""

    def __init__(self, d: int, role: str, batch_dims: Sequence[int] = ()):
        super().__init__(d, role, batch_dims)
        self.beta = 2.0
        self.inner = DirectScale(d, role, batch_dims)

    def forward(self) -> Tensor:
        return self.beta * self.inner() - 0.5

    def set_gamma(self, gamma: Tensor) -> None:
        self.inner.set_gamma((gamma + 0.5) / 2)


class Unset(Softplus):
    def __init__(self, *args: Any):
        super().__init__(*args)
        self.b = nn.Parameter(torch.randn(*self.batch_dims, 1))

    def forward(self) -> Tensor:
        return super().forward() + 0 * self.b.nan_to_num()


class ExpOr(OriginalSpaceScale):
    def forward(self) -> Tensor:
        return self.alpha * self.beta.exp() / self.alpha.square().mean(-1, keepdim=True).sqrt()

    @torch.no_grad()
    def set_gamma(self, gamma: Tensor) -> None:
        super().set_gamma(gamma)
        self.beta.copy_(self.beta.log())


WRONG = {
    Unset: " b, which set_gamma leaves unset",
    ExpOr: r"gamma of 2\.718; expected 1",
    Constant: r"tensor fixed; expected",
    Copies: r"returns 1.313 after set_gamma\(1\);",
    Detached: " w no gradient",
    OneForAll: r"shape \(64,\).* \(2, 64\)",
}


@pytest.mark.parametrize("cls", [*PARAMETERIZATIONS.values(), Softplus, LowRank])
def test_check_parameterization_valid_class_draws_nothing(cls: type[ScaleVector]) -> None:
    check_parameterization.cache_clear()
    state = torch.get_rng_state()
    with torch.device("meta"):  # on which a plan builds the model
        check_parameterization(cls)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("cls", WRONG, ids=lambda cls: cls.__name__)
def test_check_parameterization_invalid_class_refused(cls: type[ScaleVector]) -> None:
    with pytest.raises(
        ValueError, match=f"the parameterization {__name__}:{cls.__name__} .*{WRONG[cls]}"
    ):
        check_parameterization(cls)


def test_vector_made_of_a_vector_starts_at_one_and_has_its_role() -> None:
    config = BackboneConfig(d_model=16, n_layer=1, n_head=2, vocab_size=32)
    model = Backbone(config, f"hg+{__name__}:Composed+nowd", seed=0)
    vector = model.layers[0].attn.qkv.q_proj.scale_in
    assert isinstance(vector, Composed) and vector.magnitude is None
    torch.testing.assert_close(vector(), torch.ones(16))
    name = "layers.0.attn.qkv.q_proj.scale_in.inner.gamma"
    roles = {
        group.role: group.decays
        for group in role_groups(model, frozenset())
        if name in [member.name for member in group.members]
    }
    assert roles == {"input": False}
