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
def test_shared_keys_and_values_are_copies_of_them(text: str, config: BackboneConfig) -> None:
    """Under every strategy, with documents masked or not; gradients of a shared head add up those of its copies."""
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


def test_fewer_keys_and_values_have_fewer_parameters_and_the_same_attention() -> None:
    config = BackboneConfig(d_model=64, n_layer=3, n_head=8, vocab_size=48)
    grouped = replace(config, n_kv_head=2)
    many, few = (activated_parameters(meta_backbone(c, "unified"), c) for c in (config, grouped))
    vectors = 2 * 6 * 8  # output-side ones of k and v
    assert many - few == 3 * (2 * 6 * 8 * 64 + vectors)
    assert flops_per_token(many, config, 16) - flops_per_token(few, grouped, 16) == 6 * (many - few)


def test_settings_name_what_is_set_alone(config: BackboneConfig) -> None:
    """Hashes of runs, and their checkpoints, are those of before there was sharing."""
    assert not {"n_kv_head", "rope_scaling"} & config.settings().keys()
    scaled = replace(config, n_kv_head=1, rope_scaling=RopeScalingConfig(8, 1, 4, 64))
    assert BackboneConfig(**scaled.settings()) == scaled


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"n_kv_head": 3}, "n_kv_head"),
        ({"n_kv_head": 0}, "n_kv_head"),
        ({"n_kv_head": 8}, "n_kv_head"),
        ({"rope_scaling": {"factor": 0.0}}, "rope_scaling.factor"),
        ({"rope_scaling": {"high_freq_factor": 1.0}}, "rope_scaling.high_freq_factor"),
        ({"rope_scaling": {"original_context": float("nan")}}, "rope_scaling.original_context"),
    ],
)
def test_sizes_that_cannot_be(change: dict, key: str) -> None:
    if "rope_scaling" in change:
        usual = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_context": 64}
        change = {"rope_scaling": usual | change["rope_scaling"]}
    with pytest.raises(ValueError, match=f"model.backbone.{key}"):
        BackboneConfig(**({"d_model": 32, "n_layer": 2, "n_head": 4} | change))


def test_fast_channels_turn_as_before_and_slow_ones_more_slowly() -> None:
    like = torch.ones(1, dtype=torch.float64)
    scaling = RopeScalingConfig(factor=8, low_freq_factor=1, high_freq_factor=4, original_context=64)
    plain, slow = ([t.squeeze(1) for t in rope_tables(2, 8, 5000.0, like, s)] for s in (None, scaling))
    angles, found = (torch.atan2(sin[1], cos[1]) for cos, sin in (plain, slow))
    assert found[0] == angles[0] and angles[1] / 8 < found[1] < angles[1]
    torch.testing.assert_close(found[2:], angles[2:] / 8)
