"""Llama and Gemma: initialization, masks, refused settings of all configs, compilation, memory and
FLOPs."""

import copy
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lightning_sv import Backbone, BackboneConfig, ScaleStrategy
from lightning_sv.corpus import CorpusConfig
from lightning_sv.errors import ConfigError
from lightning_sv.nn import (
    activated_parameters,
    document_ids,
    flops_per_token,
    meta_backbone,
    next_token_loss,
    router_loss,
)
from lightning_sv.nn.backbone import INDUCTOR, compile_backbone
from lightning_sv.nn.init import init_weights
from lightning_sv.nn.rope import rope_tables
from lightning_sv.optim import OptimConfig, ScheduleConfig
from lightning_sv.optim.groups import parameter_roles
from lightning_sv.plan.allocated_bytes import AllocatedBytes
from lightning_sv.scale import ScaleOptions
from lightning_sv.scale.fast import cross_entropy
from lightning_sv.scale.fast.eager import CHUNK_ELEMENTS
from tests.conftest import EVERY_BUILD, FEW_BUILDS, GEMMA, LLAMA_31, MOE, perturbed, thinned
from tests.paper_llama import PaperLlama
from tests.tolerances import assert_near


@pytest.mark.parametrize(
    "family", [{}, MOE, {"post_norm": True}], ids=["dense", "moe", "post_norm"]
)
@pytest.mark.parametrize("text", EVERY_BUILD)
def test_backbone_without_output_norm_starts_as_llama(
    text: str, family: dict, config: BackboneConfig
) -> None:
    config = replace(config, **family)
    tokens = torch.randint(0, config.vocab_size, (2, 9))
    llama = Backbone(config, "llama", seed=3).double()(tokens)
    ours = Backbone(config, text, seed=3).double()(tokens)
    if ScaleStrategy.parse(text).placement_row.norm_out:
        assert not torch.allclose(ours, llama)
        assert ((ours.square().mean(-1) - 1).abs() < 0.02).all()
    else:
        torch.testing.assert_close(ours, llama, rtol=1e-9, atol=1e-12)


def test_init_weights_depend_on_seed_and_name_only(config: BackboneConfig) -> None:
    a = Backbone(config, seed=1)
    b = Backbone(config, "unified", seed=1)
    c = Backbone(config, seed=2)
    weights = {n: p for n, p in b.named_parameters() if n.endswith("weight")}
    for name, parameter in a.named_parameters():
        if name in weights:
            assert torch.equal(parameter, weights[name])
            assert not torch.equal(parameter, c.get_parameter(name))
    attn = a.layers[0].attn
    assert not torch.equal(attn.qkv.q_proj.weight, attn.qkv.k_proj.weight)


@pytest.mark.parametrize("residual_scaling", [True, False])
@pytest.mark.parametrize("family", [{}, MOE], ids=["dense", "moe"])
def test_init_weights_have_the_std_of_their_role(
    family: dict, residual_scaling: bool, config: BackboneConfig
) -> None:
    stds = {"matrix": 0.1, "head": 0.0, "embedding": 0.5}
    if family:
        stds["router"] = 0.7
    config = replace(
        config, init_std_by_role=stds, init_residual_scaling=residual_scaling, **family
    )
    for named in parameter_roles(Backbone(config)):
        if named.role in stds:
            std = stds[named.role]
            if residual_scaling and named.name.endswith(("o_proj.weight", "down_proj.weight")):
                std /= 2  # sqrt(2 n_layer)
            assert named.parameter.std().item() == pytest.approx(std, rel=0.2), named.name


@pytest.mark.parametrize("text", FEW_BUILDS)
def test_backbone_with_another_eps_and_theta_equals_the_papers_equations(
    text: str, config: BackboneConfig
) -> None:
    config = replace(config, norm_eps=0.1, rope_theta=50.0)
    model = perturbed(Backbone(config, text)).double()
    block = torch.randint(0, config.vocab_size, (2, 13))
    tokens = block[:, :-1]
    targets = block[:, 1:]
    logits = PaperLlama(model)(tokens).logits
    torch.testing.assert_close(model(tokens), logits)
    torch.testing.assert_close(model(tokens, targets=targets), next_token_loss(logits, targets))


def test_rotary_tables_of_16_bit_weights_are_float32() -> None:
    """In bf16, positions above 256 would be equal to their neighbors."""
    like = torch.empty(0)
    narrow = rope_tables(600, 8, 1e4, like.bfloat16())
    torch.testing.assert_close(narrow, rope_tables(600, 8, 1e4, like), rtol=0, atol=0)


@pytest.mark.parametrize("family", [{}, MOE], ids=["dense", "moe"])
def test_init_weights_under_other_torch_defaults_are_equal(
    family: dict, config: BackboneConfig
) -> None:
    """Lightning builds the model with its device and dtype as torch's defaults."""
    config = replace(config, **family)
    plain, inside = (Backbone(config, "unified", seed=1) for _ in range(2))
    for parameter in inside.parameters():
        torch.nn.init.zeros_(parameter)
    with torch.device("meta"):
        init_weights(inside, config, seed=1)
    torch.set_default_dtype(torch.float64)  # as Lightning does under 64-true
    try:
        wide = Backbone(config, "unified", seed=1)
    finally:
        torch.set_default_dtype(torch.float32)
    models = zip(plain.named_parameters(), inside.parameters(), wide.parameters(), strict=True)
    for (name, expected), narrow, double in models:
        assert torch.equal(narrow, expected) and torch.equal(double, expected.double()), name


def test_backbone_masks_hide_later_tokens_and_other_documents(config: BackboneConfig) -> None:
    model = Backbone(config).double()
    tokens = torch.randint(1, config.vocab_size, (1, 12))
    changed = tokens.clone()
    changed[0, 8] = (tokens[0, 8] + 1) % config.vocab_size
    assert torch.equal(model(tokens)[:, :8], model(changed)[:, :8])
    tokens[0, 5] = 0  # end of text
    documents = document_ids(tokens, eot=0)
    assert documents.tolist() == [[0] * 6 + [1] * 6]
    plain = document_ids(tokens, eot=config.vocab_size)
    torch.testing.assert_close(model(tokens, plain), model(tokens), rtol=1e-9, atol=1e-12)
    other = tokens.clone()
    other[0, :5] = torch.randint(1, config.vocab_size, (5,))
    after = model(other, documents)[:, 6:]
    torch.testing.assert_close(after, model(tokens, documents)[:, 6:], rtol=1e-9, atol=1e-12)
    assert not torch.allclose(model(other)[:, 6:], model(tokens)[:, 6:])


SCALING = LLAMA_31["rope_scaling"]
LLAMA = partial(BackboneConfig, d_model=32, n_layer=2, n_head=4)


@pytest.mark.parametrize(("kind", "settings", "key"), [
    (LLAMA, {"n_layer": 0}, "model.backbone.n_layer"),
    (LLAMA, {"init_std": 0.0}, "model.backbone.init_std"),
    (LLAMA, {"rope_theta": math.inf}, "model.backbone.rope_theta"),
    (LLAMA, {"n_kv_head": 3}, "model.backbone.n_kv_head"),
    (LLAMA, {"rope_scaling": SCALING | {"factor": 0.0}}, "model.backbone.rope_scaling.factor"),
    (LLAMA, {"rope_scaling": SCALING | {"high_freq_factor": 1.0}}, "model.backbone.rope_scaling.high_freq_factor"),
    (LLAMA, {"d_model": 30}, "model.backbone.d_model"),
    (LLAMA, {"d_model": 6, "n_head": 2}, "model.backbone: the head width"),
    (LLAMA, {"n_expert": -1}, "model.backbone.n_expert"),
    (LLAMA, {"n_expert": 4, "n_expert_active": 0}, "model.backbone.n_expert_active"),
    (LLAMA, {"n_expert": 4, "n_expert_active": 1}, "model.backbone.n_expert_active"),
    (LLAMA, {"n_expert": 4, "n_expert_active": 4}, "model.backbone.n_expert"),
    (LLAMA, {"n_expert": 8, "n_expert_shared": 2}, "model.backbone.n_expert_shared"),
    (LLAMA, {"router": {"balance": "bias"}}, "model.backbone.router"),
    (LLAMA, {"n_expert": 8, "n_expert_shared": 0, "router": {"gate_shared": True}}, "model.backbone.router.gate_shared"),
    (LLAMA, {"router": {"balance_coef": math.nan}}, "model.backbone.router.balance_coef"),
    (LLAMA, {"router": {"balance": "auction"}}, "model.backbone.router.balance"),
    (LLAMA, {"router": {"z_coef": -1.0}}, "model.backbone.router.z_coef"),
    (OptimConfig, {"beta2": 1.0}, "model.optim.beta2"),
    (OptimConfig, {"lr": 0.0}, "model.optim.lr"),
    (OptimConfig, {"weight_decay": -1.0}, "model.optim.weight_decay"),
    (OptimConfig, {"eps": math.nan}, "model.optim.eps"),
    (OptimConfig, {"ns_dtype": "float16"}, "model.optim.ns_dtype"),
    (OptimConfig, {"undecayed": ["embedding", "input"]}, "model.optim.undecayed"),
    (OptimConfig, {"muon_roles": []}, "model.optim.muon_roles"),
    (OptimConfig, {"lr_factor_by_role": {"head": math.inf}}, "model.optim.lr_factor_by_role"),
    (OptimConfig, {"weight_decay_by_role": {"head": -1.0}}, "model.optim.weight_decay_by_role"),
    (OptimConfig, {"clip_by_role": {"input": 0.0}}, "model.optim.clip_by_role"),
    (ScheduleConfig, {"name": "linear"}, "model.schedule.name"),
    (ScheduleConfig, {"final_ratio": -0.1}, "model.schedule.final_ratio"),
    (ScheduleConfig, {"stable_ratio": 1.1}, "model.schedule.stable_ratio"),
    (ScheduleConfig, {"warmup_ratio": 0.9, "name": "wsd"}, "model.schedule.warmup_ratio"),
    (CorpusConfig, {"source": "web"}, "source"),
    (CorpusConfig, {"source": "files:"}, "source"),
    (CorpusConfig, {"val_fraction": 0.0}, "val_fraction"),
    (CorpusConfig, {"max_bytes": 0}, "max_bytes"),
    (CorpusConfig, {"chunk_bytes": "64 parsecs"}, "chunk_bytes"),
])  # fmt: skip
def test_setting_out_of_range_refused(
    kind: Callable[..., object], settings: dict[str, Any], key: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^{re.escape(key)}\b"):
        kind(**settings)


@pytest.mark.parametrize("sizes", [{}, {"n_kv_head": 1}], ids=["llama", "shared keys"])
def test_flops_per_token_equal_torchs_count(sizes: dict, config: BackboneConfig) -> None:
    config = replace(config, **sizes)
    model = Backbone(config)
    assert activated_parameters(model, config) == sum(p.numel() for p in model.parameters())
    tokens = torch.randint(0, 48, (1, 16))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as flops:
        model(tokens).sum().backward()
    ours = 16 * flops_per_token(activated_parameters(model, config), config, 16)
    assert ours == pytest.approx(flops.get_total_flops(), rel=0.02)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "family"), [("llama", {}), ("unified", MOE)], ids=["llama", "unified-moe"]
)
def test_compiled_backbone_and_gradients_equal_eager(
    text: str, family: dict, config: BackboneConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, because gradients that nearly cancel need it; the loss of `unified` is by the
    Gram matrix."""
    monkeypatch.setattr(cross_entropy, "GRAM_FROM", 0)
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", 64)  # 32 of 64 tokens per chunk
    config = replace(config, n_layer=1, **family)
    tokens = torch.randint(0, config.vocab_size, (2, 32))
    results = []
    # torch 2.11 compiles the flash attention of a CPU in float64 to a call that it then refuses
    kernels = [SDPBackend.MATH]
    if torch.__version__ >= "2.12":
        kernels.append(SDPBackend.FLASH_ATTENTION)
    for compiled in (False, True):
        model = Backbone(config, text).double()
        if compiled:
            model.compile(fullgraph=True)
            assert all("_orig_mod" not in key for key in model.state_dict())
        with sdpa_kernel(kernels):
            nats, routings = model(tokens, targets=tokens.roll(-1, 1), with_routing=True)
            loss = nats + router_loss(routings, config)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    (exact, *gradients), (loss, *found) = results
    # The widths of all sums of a block are 380, of the head 130; there and back. A gradient may be
    # what is left of a cancellation (under dnp that of the input side's beta is), so its error is
    # held against all of them: 2e-13 of their norm, and the smallest is 1e-7 of it.
    assert_near(loss, exact, terms=510)
    whole = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    for gradient, fast in zip(gradients, found, strict=True):
        assert_near(fast, gradient, terms=1020, size=whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [{}, pytest.param(MOE, marks=pytest.mark.long)], ids=["dense", "moe"]
)
def test_compile_block_once_for_all_depths(
    family: dict, config: BackboneConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = torch.randint(0, config.vocab_size, (2, 16))
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compilations = []
    compile_ = torch.compile
    before = {key: getattr(torch._inductor.config, key) for key in INDUCTOR}

    def counted(
        forward: Callable[..., Any], dynamic: bool, options: dict[str, Any]
    ) -> Callable[..., Any]:
        assert options == INDUCTOR
        return compile_(forward, dynamic=dynamic, backend=counter)

    monkeypatch.setattr(torch, "compile", counted)
    for n_layer in (2, 4):
        deep = replace(config, n_layer=n_layer, **family)
        plain, model = (Backbone(deep, "unified").double() for _ in range(2))
        compile_backbone(model, "block")
        assert model.state_dict().keys() == plain.state_dict().keys()
        for each in (plain, model):
            next_token_loss(each(tokens), tokens.roll(-1, 1)).backward()
        for eager, fast in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(fast.grad, eager.grad, rtol=1e-9, atol=1e-12)
        compilations.append(counter.frame_count)
    assert compilations[0] == compilations[1] > 0  # the deeper model reuses the compilation
    # what else this process compiles, a benchmark's peers for instance, keeps PyTorch's defaults
    assert {key: getattr(torch._inductor.config, key) for key in INDUCTOR} == before != INDUCTOR


@pytest.mark.parametrize("family", thinned([{}, MOE, GEMMA], [{}]), ids=["dense", "moe", "gemma"])
def test_activation_checkpointing_saves_less_equal_gradients(
    family: dict, config: BackboneConfig
) -> None:
    tokens = torch.randint(0, config.vocab_size, (4, 64))
    kept = []
    gradients = []
    for on in (False, True):
        model = Backbone(
            replace(config, n_layer=4, **family), "iwd" if "qk_norm" in family else "unified"
        )
        model.activation_checkpointing = on
        with AllocatedBytes() as counter:
            logits, routings = model(tokens, with_routing=True)
            loss = next_token_loss(logits, tokens.roll(-1, 1)) + router_loss(routings, model.config)
        kept.append(counter.now)
        loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *gradients))
    assert kept[1] < 0.5 * kept[0]


@pytest.mark.parametrize(
    "family", [{}, MOE, {"post_norm": True}], ids=["dense", "moe", "post_norm"]
)
@pytest.mark.parametrize("text", thinned(["hg+or", "unified"], ["unified"]))
def test_narrow_residual_is_bf16_under_autocast_only(
    text: str, family: dict, config: BackboneConfig
) -> None:
    block = torch.randint(0, config.vocab_size, (4, 33))
    distances = []
    seen = []
    model = Backbone(replace(config, n_layer=4, init_std=0.2, **family), text)
    model.layers[-1].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].dtype))
    plain = model(block[:, :-1])
    exact = copy.deepcopy(model).double()(block[:, :-1])
    for model.narrow_residual in (False, True):
        assert torch.equal(model(block[:, :-1]), plain)
        with torch.autocast("cpu", torch.bfloat16):
            distances.append(((model(block[:, :-1]).double() - exact).norm() / exact.norm()).item())
    assert seen[-4:] == [torch.float32, torch.float32, torch.float32, torch.bfloat16]
    assert 0 < distances[1] < 3 * distances[0]


def test_qk_norm_with_dnp_refused(config: BackboneConfig) -> None:
    with pytest.raises(ValueError, match="model.backbone.qk_norm"):
        meta_backbone(replace(config, qk_norm=True), "unified")
    options = ScaleOptions(placement_at={"q_proj": "dp", "k_proj": "dp"})
    meta_backbone(replace(config, **GEMMA), "unified", options)  # as the message advises
