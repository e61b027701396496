"""One output-side vector for all heads of a branch."""

import pytest
import torch

from lightning_sv import Backbone, BackboneConfig
from lightning_sv.scale import ScaleOptions, ScaleStrategy
from lightning_sv.scale.vector import DirectScale, HeadShared
from tests.conftest import BUILDS, FEW_BUILDS, perturbed, thinned

Q_AND_K, ALL = ["q_proj", "k_proj"], ["q_proj", "k_proj", "v_proj"]
WITH_OUT = thinned([text for text in BUILDS if ScaleStrategy.parse(text).placement_row.scale_out], FEW_BUILDS)


@pytest.mark.filterwarnings("ignore:scale strategy")
@pytest.mark.parametrize(("sites", "across"), [(Q_AND_K, False), (ALL, True)])
@pytest.mark.parametrize("text", WITH_OUT)
def test_shared_heads_equal_equal_heads(text: str, sites: list[str], across: bool, config: BackboneConfig) -> None:
    """The gradient of a shared vector is the sum over the heads. `across`: shared by q, k and v too."""
    shared = Backbone(config, text, ScaleOptions(share_heads=sites, share_scale_out=across))
    shared = perturbed(shared).double()
    full = Backbone(config, text, ScaleOptions(share_scale_out=across)).double()
    theirs = dict(full.named_parameters())
    alike = {name: theirs[name.replace(".vector.", ".")] for name, _ in shared.named_parameters()}
    assert len(alike) == len(theirs)
    with torch.no_grad():
        for name, parameter in shared.named_parameters():
            alike[name].copy_(parameter.flatten().repeat(alike[name].numel() // parameter.numel()).view_as(alike[name]))
    tokens = torch.randint(0, config.vocab_size, (2, 9))
    ours = shared(tokens[:, :-1], targets=tokens[:, 1:])
    torch.testing.assert_close(ours, full(tokens[:, :-1], targets=tokens[:, 1:]), rtol=1e-12, atol=0)
    grads = torch.autograd.grad(ours, list(shared.parameters()))
    summed = torch.autograd.grad(full(tokens[:, :-1], targets=tokens[:, 1:]), list(alike.values()))
    for grad, expected in zip(grads, summed, strict=True):
        torch.testing.assert_close(grad, expected.reshape(-1, *grad.shape).sum(0), rtol=1e-9, atol=1e-12)


def test_share_heads_site_without_heads_or_vector_is_refused(config: BackboneConfig) -> None:
    for sites in (["gate_proj"], ["lm_head"], ["o_proj"]):
        with pytest.raises(ValueError, match=f"names '{sites[0]}'.*: k_proj q_proj v_proj"):
            Backbone(config, "dp", ScaleOptions(share_heads=sites))
    with pytest.raises(ValueError, match="names 'q_proj'.*: none"):
        Backbone(config, "llama", ScaleOptions(share_heads=Q_AND_K))
    with pytest.raises(ValueError, match="names 'q_proj'.*: k_proj v_proj"):
        Backbone(config, "hg+dp", ScaleOptions({"q_proj": "bp"}, share_heads=Q_AND_K))


def test_set_gamma_different_between_heads_is_refused() -> None:
    vector = HeadShared(DirectScale(3, "output"), 2)
    vector.set_gamma(torch.tensor([1.0, 2, 3, 1, 2, 3]))
    assert vector.vector.gamma.tolist() == [1, 2, 3] and vector.magnitude is None
    with pytest.raises(ValueError, match="share_heads"):
        vector.set_gamma(torch.arange(6.0))
