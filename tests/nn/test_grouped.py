"""Queries that share keys and values, and Llama 3.1's rotation, against the same function without them."""

from dataclasses import replace

import pytest
import torch

from lightning_sv import Backbone, BackboneConfig
from lightning_sv.nn import RopeScalingConfig, activated_parameters, flops_per_token, meta_backbone
from lightning_sv.nn.rope import rope_tables
from tests.conftest import EVERY_BUILD, perturbed


@pytest.mark.filterwarnings("ignore:scale strategy")
@pytest.mark.parametrize("text", EVERY_BUILD)
def test_grouped_query_attention_equals_copied_keys_and_values(text: str, config: BackboneConfig) -> None:
    """The gradient of a shared head is the sum over its copies."""
    config = replace(config, n_layer=1, n_head=4)
    model = perturbed(Backbone(replace(config, n_kv_head=2), text).double())
    copied = Backbone(config, text).double()
    copied.load_state_dict(
        {name: expanded(value, copied.state_dict()[name]) for name, value in model.state_dict().items()}
    )
    for name in ("k_proj", "v_proj"):  # what a vector is made of may depend on its width
        ours, theirs = (net.layers[0].attn.qkv.vectors(name)[1] for net in (model, copied))
        if ours is not None:
            theirs.set_gamma(expanded(ours(), theirs()))
    tokens = torch.randint(0, config.vocab_size, (2, 9))
    for documents in (None, torch.tensor([[0] * 4 + [1] * 5] * 2)):
        torch.testing.assert_close(model(tokens, documents), copied(tokens, documents), rtol=1e-9, atol=1e-12)
    gradients = []
    for net in (model, copied):
        net(tokens[:, :-1], targets=tokens[:, 1:]).backward()
        gradients.append(net.layers[0].attn.qkv.v_proj.weight.grad)
    summed = gradients[1].unflatten(0, (2, 2, 8)).sum(1).flatten(0, 1)
    torch.testing.assert_close(gradients[0], summed, rtol=1e-9, atol=1e-12)


def expanded(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Rows of heads of width 8, each repeated for the queries that share it."""
    if value.shape == like.shape:
        return value
    return value.unflatten(0, (-1, 8)).repeat_interleave(2, dim=0).flatten(0, 1)


def test_grouped_query_attention_parameters_and_flops() -> None:
    config = BackboneConfig(d_model=64, n_layer=3, n_head=8, vocab_size=48)
    grouped = replace(config, n_kv_head=2)
    many, few = (activated_parameters(meta_backbone(c, "unified"), c) for c in (config, grouped))
    vectors = 2 * 6 * 8  # output-side ones of k and v
    assert many - few == 3 * (2 * 6 * 8 * 64 + vectors)
    assert flops_per_token(many, config, 16) - flops_per_token(few, grouped, 16) == 6 * (many - few)


def test_backbone_settings_omit_defaults(config: BackboneConfig) -> None:
    """A new setting at its default changes no hash of a run."""
    assert not {"n_kv_head", "rope_scaling"} & config.settings().keys()
    scaled = replace(config, n_kv_head=1, rope_scaling=RopeScalingConfig(8, 1, 4, 64))
    assert BackboneConfig(**scaled.settings()) == scaled


def test_rope_scaling_keeps_fast_channels_and_slows_slow_ones() -> None:
    like = torch.ones(1, dtype=torch.float64)
    scaling = RopeScalingConfig(factor=8, low_freq_factor=1, high_freq_factor=4, original_context=64)
    plain, slow = ([t.squeeze(1) for t in rope_tables(2, 8, 5000.0, like, s)] for s in (None, scaling))
    angles, found = (torch.atan2(sin[1], cos[1]) for cos, sin in (plain, slow))
    assert found[0] == angles[0] and angles[1] / 8 < found[1] < angles[1]
    torch.testing.assert_close(found[2:], angles[2:] / 8)
