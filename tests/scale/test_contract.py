"""What is said of a parameterization that does not keep to the contract, before anything is trained."""

import sys
import types
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from lightning_sv.__main__ import main
from lightning_sv.nn import meta_backbone
from lightning_sv.nn.config import BackboneConfig
from lightning_sv.scale import ScaleStrategy, ScaleVector
from lightning_sv.scale.contract import check_parameterization
from lightning_sv.scale.strategy import PARAMETERIZATIONS


class Softplus(ScaleVector):
    """gamma = softplus(w), with its inverse."""

    def __init__(self, d: int, role: str, batch_dims: Sequence[int] = ()):
        super().__init__(d, role, batch_dims)  # type: ignore[arg-type]
        self.w = nn.Parameter(torch.zeros(*self.batch_dims, d))

    def forward(self) -> Tensor:
        return nn.functional.softplus(self.w)

    @torch.no_grad()
    def set_gamma(self, gamma: Tensor) -> None:
        self.w.copy_(torch.expm1(gamma).log())


class LowRank(Softplus):
    """Some gammas it cannot be, and says so."""

    def set_gamma(self, gamma: Tensor) -> None:
        if (gamma != 1).any():
            raise ValueError("a low-rank gamma cannot be this one")
        super().set_gamma(gamma)


class Eights(Softplus):
    """A width that it cannot have is its own matter, with the model's width."""

    def __init__(self, d: int, role: str, batch_dims: Sequence[int] = ()):
        raise ValueError("d must be odd")


class NoSet(ScaleVector):
    def forward(self) -> Tensor:
        return torch.ones(self.d)


class Narrow(Softplus):
    def __init__(self, d: int):
        super().__init__(d, "input")


class Nothing(Softplus):
    def __init__(self, d: int, role: str, batch_dims: Sequence[int] = ()):
        ScaleVector.__init__(self, d, role, batch_dims)  # type: ignore[arg-type]


class Copies(Softplus):
    @torch.no_grad()
    def set_gamma(self, gamma: Tensor) -> None:
        self.w.copy_(gamma)


class Twice(Softplus):
    """1 where 1 is asked for, and only there."""

    def forward(self) -> Tensor:
        return nn.functional.softplus(self.w) ** 2


class Nan(Softplus):
    def forward(self) -> Tensor:
        return super().forward() * float("nan")


class Detached(Softplus):
    def forward(self) -> Tensor:
        return nn.functional.softplus(self.w.detach())


class Short(Softplus):
    def forward(self) -> Tensor:
        return super().forward()[..., :-1]


class OneForAll(Softplus):
    def __init__(self, d: int, role: str, batch_dims: Sequence[int] = ()):
        super().__init__(d, role)
        self.batch_dims = tuple(batch_dims)

    @torch.no_grad()
    def set_gamma(self, gamma: Tensor) -> None:
        self.w.copy_(torch.expm1(gamma.flatten(0, -2)[0] if gamma.ndim > 1 else gamma).log())


class Graph(Softplus):
    def set_gamma(self, gamma: Tensor) -> None:
        self.w.copy_(torch.expm1(gamma).log())


WRONG = {
    NoSet: "set_gamma",
    Narrow: r"cannot be built \(.*\).*\(d, role, batch_dims=\(\)\)",
    Nothing: "nn.Parameter",
    Copies: r"set_gamma\(1\).* 1.313;",
    Twice: "between 0.5 and 1.5 .* 2.25;",
    Nan: r"set_gamma\(1\).* nan",
    Detached: " w no gradient",
    Short: r"shape \(63,\).* \(64,\)",
    OneForAll: r"shape \(64,\).* \(2, 64\)",
    Graph: r"fails in set_gamma or forward with batch_dims \(\) \(.*\); .*@torch.no_grad\(\)",
}


@pytest.mark.parametrize("cls", [*PARAMETERIZATIONS.values(), Softplus, LowRank, Eights])
def test_what_keeps_to_it_passes(cls: type[ScaleVector]) -> None:
    state = torch.get_rng_state()
    check_parameterization(cls)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("cls", WRONG, ids=lambda cls: cls.__name__)
def test_what_does_not_is_refused_in_a_sentence(cls: type[ScaleVector]) -> None:
    with pytest.raises(ValueError, match=f"the parameterization {__name__}:{cls.__name__} .*{WRONG[cls]}"):
        check_parameterization(cls)


def test_it_is_asked_before_a_run_and_passes_on_the_meta_device(
    monkeypatch: pytest.MonkeyPatch, run_args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    module = types.ModuleType("own_scales")
    module.Softplus, module.Copies = Softplus, Copies  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_scales", module)
    config = BackboneConfig(name="x", d_model=32, n_layer=1, n_head=2, vocab_size=64)
    check_parameterization.cache_clear()
    with torch.device("meta"):
        strategy = ScaleStrategy.parse("hg+own_scales:Softplus")
    assert all(p.is_meta for p in meta_backbone(config, strategy).parameters())
    assert main(["fit", *run_args, "--model.scale", "hg+own_scales:Copies"]) == 2
    assert ":Copies is not 1" in capsys.readouterr().err
