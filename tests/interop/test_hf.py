"""Backbones as Hugging Face's models and back: the same logits, or a reason."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from lightning_sv import Backbone, BackboneConfig
from lightning_sv.errors import ConfigError
from lightning_sv.interop import from_hugging_face, to_hugging_face
from lightning_sv.interop.inspect import vectors_of_folder
from lightning_sv.nn import RouterConfig, router_loss
from lightning_sv.scale import ScaleOptions, ScaleStrategy
from tests.conftest import BUILDS, FEW_BUILDS, GEMMA, LLAMA_31, MOE, edit_json, perturbed, thinned
from tests.interop.wide import float64_throughout
from tests.tolerances import assert_near


def test_to_hugging_face_unknown_norms_or_width_refused(config: BackboneConfig) -> None:
    with pytest.raises(ConfigError, match="d_model"):
        to_hugging_face(Backbone(BackboneConfig(32, 1, 3, 64, d_head=10)))
    with pytest.raises(ValueError, match="n_expert_shared"):
        to_hugging_face(Backbone(replace(config, **MOE, qk_norm=True)))
    with pytest.raises(ValueError, match="router.balance is bias"):
        to_hugging_face(Backbone(replace(config, **MOE, router=RouterConfig(balance="bias"))))


UNGATED = MOE | {"router": RouterConfig(renormalize=False, gate_shared=True)}
UNSHARED = MOE | {"n_expert_shared": 0}


def assert_same_logits(model: Backbone, family: str, *, own_code: bool = False) -> None:
    """Theirs is of the family, or our code on top of it, and gives our logits in float64; no scale
    vector is 1."""
    model = perturbed(model).double()
    base = getattr(transformers, f"{family}ForCausalLM")
    with float64_throughout(base):
        theirs = to_hugging_face(model, eot=3)
    assert type(
        theirs
    ).__name__ == f"{'Scaled' if own_code else ''}{family}ForCausalLM" and isinstance(theirs, base)
    assert (theirs.config.bos_token_id, theirs.generation_config.eos_token_id) == (3, 3)
    theirs.config._experts_implementation = "eager"  # their grouped product knows no float64
    tokens = torch.randint(0, model.config.vocab_size, (3, 24))
    with torch.no_grad(), float64_throughout(base):
        found = theirs(tokens).logits
        torch.testing.assert_close(found, model(tokens), rtol=1e-9, atol=1e-12)


PLAIN = [
    ("Llama", LLAMA_31),
    ("Gemma3", GEMMA),
    ("Qwen3", {"qk_norm": True}),
    ("Qwen2Moe", MOE),
    ("Qwen2Moe", UNGATED),
    ("Qwen2Moe", UNSHARED),
    ("Qwen3Moe", UNSHARED | {"qk_norm": True}),
]


@pytest.mark.parametrize(("family", "sizes"), thinned(PLAIN, [*PLAIN[:5], PLAIN[6]], several=True))
@pytest.mark.parametrize(
    "text", thinned(["llama", "offset", "nop", "hg+dp+or"], ["offset", "hg+dp+or"])
)
def test_to_hugging_face_same_logits(
    text: str, family: str, sizes: dict[str, Any], config: BackboneConfig
) -> None:
    assert_same_logits(Backbone(replace(config, **sizes), text), family)


def test_to_hugging_face_loss_of_the_router_is_ours(config: BackboneConfig) -> None:
    """Of one layer: theirs pools the tokens of all layers."""
    config = replace(config, **MOE, n_layer=1, router=RouterConfig(balance_coef=0.02))
    model = perturbed(Backbone(config))
    tokens = torch.randint(0, config.vocab_size, (3, 24))
    theirs = to_hugging_face(model)
    (_, routings) = model(tokens, with_routing=True)
    added = theirs.router_aux_loss_coef * theirs(tokens, output_router_logits=True).aux_loss
    torch.testing.assert_close(added, router_loss(routings, config))
    config = replace(config, router=RouterConfig(balance="none", balance_coef=0.02))
    assert to_hugging_face(Backbone(config)).config.router_aux_loss_coef == 0


def test_to_hugging_face_positions_of_bf16_weights_are_exact(config: BackboneConfig) -> None:
    model = perturbed(Backbone(config)).bfloat16()
    tokens = torch.randint(0, config.vocab_size, (1, 100))
    rotary = to_hugging_face(model).model.rotary_emb
    assert rotary.inv_freq.dtype == torch.float32
    expected = Backbone(config).double()
    expected.load_state_dict(model.state_dict())
    found = to_hugging_face(model).float()(tokens).logits
    torch.testing.assert_close(found, expected(tokens).float(), rtol=1e-4, atol=1e-4)


SHARE: dict[str, Any] = {"share_heads": ["q_proj", "k_proj"]}
DENSE = {"placement_at": dict.fromkeys(("v_proj", "gate_proj", "up_proj", "lm_head"), "dp")}
SPARSE = {
    "placement_at": dict.fromkeys(("v_proj", "expert_gate_proj", "expert_up_proj", "lm_head"), "dp")
}
GEMMAS = {"placement_at": {"q_proj": "dp", "k_proj": "dp"}}
#: family, sizes and options of `unified`, and whether our code is needed
UNIFIED = [
    # dnp on q and k with vectors that heads share is plain Qwen 3
    ("Qwen3", LLAMA_31, DENSE | SHARE, False),
    ("Qwen3Moe", UNSHARED, SPARSE | SHARE, False),
    ("Qwen3", {"n_head": 1}, DENSE, False),
    # other normalized outputs
    ("Llama", LLAMA_31, {}, True),
    ("Llama", {}, {"placement_at": {"gate_proj": "dp", "lm_head": "np", "v_proj": "anp"}}, True),
    ("Gemma3", GEMMA, GEMMAS, True),
    ("Qwen3", {"qk_norm": True}, GEMMAS, True),
    ("Qwen2Moe", MOE, {}, True),
    ("Qwen2Moe", UNSHARED, {"placement_at": {"expert_gate_proj": "dp"}}, True),
    ("Qwen2Moe", MOE, SPARSE | SHARE, True),
    ("Qwen3Moe", UNSHARED | {"qk_norm": True}, GEMMAS, True),
]


@pytest.mark.parametrize(
    ("family", "sizes", "options", "own_code"),
    thinned(UNIFIED, [UNIFIED[i] for i in (0, 1, 3, 4, 5, 9)], several=True),
)
def test_to_hugging_face_unified_same_logits(
    family: str,
    sizes: dict[str, Any],
    options: dict[str, Any],
    own_code: bool,
    config: BackboneConfig,
) -> None:
    model = Backbone(replace(config, **sizes), "unified", ScaleOptions(**options))
    assert_same_logits(model, family, own_code=own_code)


SIZES: dict[str, Any] = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 5000.0}
LONG = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
#: transformers' own models, with the cases of the importer: shared keys and values, tied heads
THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": ROPE, "tie_word_embeddings": True, "num_key_value_heads": 2}),
    "llama-mha": ("Llama", {"rms_norm_eps": 1e-3}),
    "llama-3.1": ("Llama", {"rope_parameters": ROPE | LONG, "num_key_value_heads": 2, "max_position_embeddings": 512}),
    "mistral": (
        "Mistral", {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "sliding_window": 64}
    ),
    "qwen3": ("Qwen3", {"num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True}),
}  # fmt: skip
KEEPING = thinned(
    [text for text in BUILDS if not ScaleStrategy.parse(text).placement_row.norm_out],
    [*FEW_BUILDS, "shared+bp+er"],
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each of them written, with norms that have left their start, some to the negative."""
    root = tmp_path_factory.mktemp("theirs")
    for name, (family, settings) in THEIRS.items():
        torch.manual_seed(0)
        config_of = getattr(transformers, f"{family}Config")
        model = getattr(transformers, f"{family}ForCausalLM")(config_of(**SIZES | settings))
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "norm" in key:
                    parameter.add_(0.5 * torch.randn_like(parameter))
                    if "input_layernorm" in key or "q_norm" in key:
                        parameter[0] = -1.5
        model.save_pretrained(root / name)
    return {name: root / name for name in THEIRS}


@pytest.mark.parametrize("name", thinned(THEIRS, ["llama", "qwen3"]))
@pytest.mark.parametrize("text", KEEPING)
def test_from_hugging_face_any_strategy_same_logits(
    text: str, name: str, folders: dict[str, Path]
) -> None:
    family, _ = THEIRS[name]
    tokens = torch.randint(0, 48, (2, 19))
    if family == "Qwen3" and (text.startswith(("shared+nop", "hg+nop")) or "+er" in text):
        with pytest.raises(ValueError, match="layers.0.attn.q_norm"):
            from_hugging_face(folders[name], text)
        return
    ours = from_hugging_face(folders[name], text)
    theirs = getattr(transformers, f"{family}ForCausalLM").from_pretrained(folders[name]).eval()
    with torch.no_grad():
        assert_near(ours(tokens), theirs(tokens).logits, terms=700)
    assert str(ours.strategy) == str(ScaleStrategy.parse(text))
    if (
        text == "shared+bp+direct"
    ):  # the same parameters, but for a head that they tie to the embedding
        tied = theirs.config.tie_word_embeddings * ours.embed.weight.numel()
        assert sum(p.numel() for p in ours.parameters()) == theirs.num_parameters() + tied


@pytest.mark.parametrize("text", ["dp", "hg+dp+er"])
def test_from_hugging_face_initial_gamma_same_logits(text: str, folders: dict[str, Path]) -> None:
    options = ScaleOptions({"o_proj": "ap"}, share_heads=["q_proj"], initial_gamma_out=0.5)
    ours = from_hugging_face(folders["llama"], text, options)
    tokens = torch.randint(0, 48, (2, 19))
    theirs = transformers.LlamaForCausalLM.from_pretrained(folders["llama"]).eval()
    with torch.no_grad():
        assert_near(ours(tokens), theirs(tokens).logits, terms=700)
    assert (ours.layers[0].attn.o_proj.scale_out() == 0.5).all()


def test_from_hugging_face_exported_model_comes_back(
    config: BackboneConfig, tmp_path: Path
) -> None:
    """Gammas and matrices are equal too, if the strategy has the same norms."""
    for name, sizes in {
        "llama": {},
        "qwen3": {"qk_norm": True},
        "llama-3.1": LLAMA_31,
    }.items():
        model = perturbed(Backbone(replace(config, **sizes)))
        to_hugging_face(model).save_pretrained(tmp_path / name)
        back = from_hugging_face(tmp_path / name)
        assert replace(back.config, d_ff=None) == model.config
        for key, value in model.state_dict().items():
            torch.testing.assert_close(back.state_dict()[key], value, rtol=1e-6, atol=1e-6)


def rewritten(folder: Path, to: Path, **changes: Any) -> Path:
    shutil.copytree(folder, to)
    edit_json(to / "config.json", **changes)
    return to


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("mistral", {"sliding_window": 63}, "its layers have a sliding window of 63 tokens"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "llama3|Llama"),
        ("llama-3.1", {"rope_parameters": ROPE | LONG | {"high_freq_factor": 0.5}}, "high_freq_factor"),
        ("llama", {"model_type": "mine", "auto_map": {"AutoConfig": "evil.Config"}}, "model_type .* is 'mine'"),
        ("llama", {"hidden_act": "gelu"}, "its activation is gelu, not silu"),
        ("llama", {"attention_bias": True}, "its projections have biases"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "of type 'linear'"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "its weights are quantized"),
        ("llama", {"hidden_size": "wide"}, "config of Llama"),
        ("llama", {"num_hidden_layers": 3}, "model.layers.2"),
        ("llama", {"num_hidden_layers": 1}, "model.layers.1"),
        ("qwen3", {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True},
         "its layers have sliding_attention"),
        ("llama", {"model_type": "gemma3_text"}, "model_type .* is 'gemma3_text'"),
    ],
)  # fmt: skip
def test_from_hugging_face_unsupported_config_refused(
    name: str, changes: dict[str, Any], why: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=why):
        from_hugging_face(rewritten(folders[name], tmp_path / "changed", **changes))


def test_from_hugging_face_window_of_all_positions_is_read(folders: dict[str, Path]) -> None:
    assert from_hugging_face(folders["mistral"]).config.n_kv_head == 2


def test_from_hugging_face_wrapped_names_same_weights(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = rewritten(folders["qwen3"], tmp_path / "wrapped")
    stored = load_file(folder / "model.safetensors")
    layer = "layers.1._checkpoint_wrapped_module."
    renamed = {
        f"_orig_mod.module.{key}".replace("layers.1.", layer): value
        for key, value in stored.items()
    }
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    expected = from_hugging_face(folders["qwen3"]).state_dict()
    found = from_hugging_face(folder).state_dict()
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    expected_vectors, found_vectors = (
        vectors_of_folder(path).vectors for path in (folders["qwen3"], folder)
    )
    for vector, expected_vector in zip(found_vectors, expected_vectors, strict=True):
        assert vector.name == expected_vector.name and torch.equal(
            vector.stored, expected_vector.stored
        )


def test_from_hugging_face_damaged_folder_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="config.json cannot be read"):
        from_hugging_face(tmp_path)
    folder = rewritten(folders["llama"], tmp_path / "pickled")
    weights = folder / "model.safetensors"
    torch.save(load_file(weights), folder / "pytorch_model.bin")
    whole = weights.read_bytes()
    weights.unlink()
    with pytest.raises(ValueError, match=r"no \*.safetensors"):
        from_hugging_face(folder)
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="cannot be read"):
        from_hugging_face(folder)
