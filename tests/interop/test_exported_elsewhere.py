"""Exported folders with normalized outputs in other tools: PEFT, quantization, resizing, other
heads."""

from pathlib import Path

import peft
import pytest
import torch
import transformers
from torch import Tensor

from lightning_sv import Backbone, BackboneConfig
from lightning_sv.interop import to_hugging_face
from lightning_sv.scale import ScaleOptions
from tests.conftest import perturbed
from tests.tolerances import assert_near

LOCAL = {"trust_remote_code": True, "local_files_only": True}


@pytest.fixture
def folder(config: BackboneConfig, tmp_path: Path) -> Path:
    """All outputs of matrices behind norms are normalized, also the logits."""
    to_hugging_face(perturbed(Backbone(config, "unified"))).save_pretrained(tmp_path / "unified")
    return tmp_path / "unified"


@pytest.fixture
def tokens(config: BackboneConfig) -> Tensor:
    return torch.randint(0, config.vocab_size, (2, 9))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["LoRA", "DoRA"])
def test_peft_merge_keeps_the_logits(kind: str, folder: Path, tokens: Tensor) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **LOCAL).eval()
    plain = model(tokens).logits
    settings = peft.LoraConfig(
        target_modules="all-linear", init_lora_weights=False, use_dora=kind == "DoRA"
    )
    adapted = peft.get_peft_model(model, settings).eval()
    assert any(".q_proj.linear.lora_A" in name for name, _ in adapted.named_parameters())
    expected = adapted(tokens).logits
    assert (expected - plain).abs().max() > 0.1
    assert_near(adapted.merge_and_unload()(tokens).logits, expected, terms=700)


@torch.no_grad()
def test_resize_with_plain_head_saves_and_loads(
    config: BackboneConfig, tmp_path: Path, tokens: Tensor
) -> None:
    backbone = perturbed(Backbone(config, "unified", ScaleOptions(placement_at={"lm_head": "dp"})))
    model = to_hugging_face(backbone)
    model.resize_token_embeddings(config.vocab_size + 3, mean_resizing=False)
    model.save_pretrained(tmp_path / "resized")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "resized", **LOCAL).eval()
    logits = loaded(tokens).logits
    assert logits.shape[-1] == config.vocab_size + 3
    assert_near(logits[..., : config.vocab_size], backbone(tokens), terms=700)


@torch.no_grad()
def test_body_alone_is_the_same_and_other_heads_are_refused(
    config: BackboneConfig, tmp_path: Path, tokens: Tensor
) -> None:
    model = to_hugging_face(perturbed(Backbone(config, "unified")))
    model.save_pretrained(tmp_path / "unified")
    body = transformers.AutoModel.from_pretrained(tmp_path / "unified", **LOCAL).eval()
    expected = model.model(tokens).last_hidden_state
    assert_near(body(tokens).last_hidden_state, expected, terms=700)
    with pytest.raises(ValueError, match="AutoModelForSequenceClassification"):
        transformers.AutoModelForSequenceClassification.from_pretrained(
            tmp_path / "unified", **LOCAL
        )
