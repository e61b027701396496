"""Options of Learnable Multipliers (arXiv:2601.04890): vectors of every matrix, and settings by
role."""

import math
from dataclasses import replace
from itertools import chain

import pytest
import torch
from torch.nn.utils import get_total_norm

from lightning_sv.errors import ConfigError
from lightning_sv.interop.fold import fold
from lightning_sv.lit.run_arguments import parse_run
from lightning_sv.nn import Backbone, BackboneConfig, meta_backbone
from lightning_sv.optim import OptimConfig, build_optimizer, clip_by_role, matrix_rate, role_groups
from lightning_sv.scale import ScaleOptions, ScaleStrategy
from tests.conftest import argv

SMALL = BackboneConfig(d_model=16, n_layer=2, n_head=2, vocab_size=32, d_ff=24)


@pytest.mark.parametrize("placement", ["dp", "bp", "ap"])
def test_fold_moe_down_proj_vectors_per_expert(placement: str) -> None:
    config = replace(SMALL, n_expert=4, n_expert_active=2)
    gamma = 1.0 if placement == "bp" else 0.5
    places = {"expert_down_proj": placement, "shared_down_proj": placement}
    model = Backbone(config, "llama", ScaleOptions(places, initial_gamma_out=gamma)).double()
    plain = Backbone(config, "llama").double()
    for name, parameter in plain.named_parameters():
        if name.endswith("down_proj.weight"):
            parameter.data.mul_(gamma)
    tokens = torch.arange(9)[None]
    torch.testing.assert_close(model(tokens), plain(tokens), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(fold(model)(tokens), plain(tokens), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("scale", ["hg+dnp+or", "hg+dp+er", "hg+dp"])
def test_initial_gamma_out_sets_the_magnitude_only(scale: str) -> None:
    options = ScaleOptions(initial_gamma_out=0.25)
    model = Backbone(SMALL, scale, options)
    v = model.layers[0].attn.qkv.v_proj
    torch.testing.assert_close(v.scale_out(), torch.full((16,), 0.25))
    if scale.endswith("or"):
        assert (v.scale_out.alpha == 1).all() and v.scale_out.beta.item() == 0.25
    assert (v.scale_in() == 1).all()
    assert meta_backbone(SMALL, ScaleStrategy.parse(scale), options).head.lm_head.weight.is_meta


def test_clip_by_role_clips_the_other_roles_together() -> None:
    model = Backbone(SMALL)
    settings = OptimConfig(lr_factor_by_role={"head": 0.5})
    optimizer = build_optimizer(role_groups(model, frozenset()), settings, 0.01)
    assert matrix_rate(optimizer.param_groups) == 0.01
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    members = {group["role"]: group["params"] for group in optimizer.param_groups}

    def norm(*roles: str) -> float:
        parameters = chain.from_iterable(members[role] for role in roles)
        return get_total_norm([parameter.grad for parameter in parameters]).item()

    total = norm(*members)
    of_head = norm("head")
    found = clip_by_role(model.parameters(), optimizer, 1.0, {"input": 0.5, "head": math.inf})
    assert found == pytest.approx(total)
    norms = (norm("input"), norm("head"), norm("matrix", "embedding"))
    assert norms == pytest.approx((0.5, of_head, 1.0), rel=1e-4)


@pytest.mark.parametrize(
    "words",
    [
        "--model.backbone.init_std_by_role '{router: 0.1}'",
        "--model.backbone.init_std_by_role '{embedding: -1}'",
        "--model.optim.lr_factor_by_role '{matrix: 0.1}'",
        "--model.optim.lr_factor_by_role '{router: 0.1}'",
        "--model.optim.clip_by_role '{embedding: 0}'",
        "--model.optim.clip_by_role '{everything: 1}'",
        "--model.scale hg+dp+iwd --model.optim.weight_decay_by_role '{output: 0.1}'",
        "--model.optim.undecayed [router]",
        "--model.optim.undecayed [head] --model.optim.weight_decay_by_role '{head: 0.1}'",
        "--model.scale_options.placement_at '{o_proj: dnp}'",
        "--model.scale_options.placement_at '{shared_down_proj: dp}'",
        "--model.scale_options.initial_gamma_out 0",
    ],
)
def test_parse_run_option_without_effect_refused(words: str) -> None:
    arguments = argv(words)
    key = arguments[-2].removeprefix("--model.")
    with pytest.raises((ConfigError, SystemExit), match=key.rpartition(".")[2]):
        parse_run(["--config", "tiny-llama", *arguments], check_corpus=False)
