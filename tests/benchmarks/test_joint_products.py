"""One product for the branches of a norm is the function of the package."""

import pytest
import torch

from benchmarks.gpu.joint_products import joint_products
from lightning_sv import Backbone, BackboneConfig
from tests.conftest import perturbed


@pytest.mark.parametrize("strategy", ["llama", "hg", "hg+dp+or", "unified"])
def test_joint_products_equal_one_product_per_branch(strategy: str) -> None:
    torch.manual_seed(0)
    config = BackboneConfig(d_model=32, n_layer=2, n_head=4, n_kv_head=2, vocab_size=48)
    model = perturbed(Backbone(config, strategy)).double()
    tokens = torch.randint(48, (2, 9))
    separate = _logits_and_gradients(model, tokens)

    with joint_products():
        joint = _logits_and_gradients(model, tokens)

    torch.testing.assert_close(joint, separate, rtol=1e-9, atol=1e-12)


def _logits_and_gradients(model: Backbone, tokens: torch.Tensor) -> list[torch.Tensor]:
    logits = model(tokens)
    gradients = torch.autograd.grad(logits.square().mean(), list(model.parameters()))
    return [logits, *gradients]
