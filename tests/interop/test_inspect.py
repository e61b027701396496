"""Statistics of scale vectors against formulas; the reads, and refused inputs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lightning_sv import Backbone, BackboneConfig
from lightning_sv.__main__ import main
from lightning_sv.interop import apply_strategy, foldable, to_hugging_face
from lightning_sv.interop.inspect import (
    StoredVector,
    load_model,
    statistics,
    vectors_of_backbone,
    vectors_of_model,
)
from lightning_sv.scale import ScaleVector
from tests.conftest import Answer, Refused, Told, perturbed, thinned, write_run_args
from tests.interop.test_apply import named
from tests.roles.families import cut, find

#: family, constant that its norms add to the stored weight, input-side vectors that cannot fold
#: because the head behind them is the embedding
FAMILIES = [
    ("llama", 0, set()),
    ("gpt2", 0, {"transformer.ln_f.weight"}),
    ("qwen3_moe", 0, set()),
    ("gemma3_text", 1, {"model.norm.weight"}),
]


@pytest.mark.parametrize(
    ("family", "origin", "tied"), thinned(FAMILIES, FAMILIES[2:], several=True)
)
def test_vectors_of_model_are_those_of_the_roles_with_statistics_by_formulas(
    family: str, origin: int, tied: set[str], tmp_path: Path
) -> None:
    model = named(family)
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    found = vectors_of_model(load_model(tmp_path))
    assert found.model == type(model).__name__ and not found.notes
    roles = {name: find(family).truth(name, p) for name, p in model.named_parameters()}
    expected = {name: role for name, role in roles.items() if role in ("input", "output")}
    assert {vector.name: vector.role for vector in found.vectors} == expected
    for row in map(statistics, found.vectors):
        gamma = model.get_parameter(row.name).detach().double().numpy() + origin
        assert row.mean == pytest.approx(gamma.mean())
        assert row.rms == pytest.approx(np.sqrt((gamma**2).mean()))
        assert row.negative == (gamma < 0).mean()
        assert row.folds == (row.role == "input" and row.name not in tied)


def test_vectors_of_model_gamma_of_unknown_form_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    def exponential(norm: Any, x: Tensor) -> Tensor:
        return norm.weight.exp() * x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()

    named("llama").save_pretrained(tmp_path / "llama")
    monkeypatch.setattr(LlamaRMSNorm, "forward", exponential)
    assert "model.norm.weight" in refused("inspect", str(tmp_path / "llama"))


def test_vectors_of_model_of_a_skipped_layer_are_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    def skip(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x if layer.self_attn.layer_idx == 1 else run(layer, x, *args, **kwargs)

    run = LlamaDecoderLayer.forward
    monkeypatch.setattr(LlamaDecoderLayer, "forward", skip)
    found = vectors_of_model(named("llama"))
    assert {cut(vector.name) for vector in found.vectors} == {
        "model.layers.input_layernorm",
        "model.layers.post_attention_layernorm",
        "model.norm",
    }
    assert not any(".1." in vector.name for vector in found.vectors)
    assert [note.split()[0] for note in found.notes] == [
        "model.layers.1.input_layernorm.weight",
        "model.layers.1.post_attention_layernorm.weight",
    ]
    assert not any("constant" in note for note in found.notes)


@pytest.mark.parametrize("strategy", ["llama", "ap", "hg+or", "hg+dp+er", "unified"])
def test_vectors_of_backbone_are_its_gammas(strategy: str) -> None:
    sizes = {"d_model": 32, "n_layer": 2, "n_head": 2, "vocab_size": 48}
    config = BackboneConfig(**sizes, n_expert=6, n_expert_active=2)
    model = perturbed(Backbone(config, strategy))
    found = {vector.name: vector for vector in vectors_of_backbone(model)}
    vectors = {name: m for name, m in model.named_modules() if isinstance(m, ScaleVector)}
    assert found.keys() == vectors.keys()
    folding = {row.vector for row in foldable(model) if not row.why}
    for name, module in vectors.items():
        assert torch.equal(found[name].stored + found[name].origin, module())
        assert found[name].role == module.role
        if name in folding:
            assert not found[name].why


def vector(stored: Tensor, origin: float = 0.0) -> StoredVector:
    return StoredVector("layers.3.norm", "input", stored, origin, "")


def test_statistics_bf16_and_outliers_counted() -> None:
    stored = torch.ones(100)
    stored[:3] = torch.tensor([0.01, -9.0, -1.5])
    row = statistics(vector(stored))
    found = (row.at_start, row.distinct, row.dead, row.outliers, row.negative)
    assert found == (0.97, 4, 0.01, 0.01, 0.02)
    assert (row.depth, row.dtype, row.smallest, row.largest) == (3, "float32", -9.0, 1.0)
    updates = torch.linspace(-1e-3, 1e-3, 100)
    kept = statistics(vector(1 + updates))
    swallowed = statistics(vector((1 + updates).bfloat16()))
    assert (kept.at_start, kept.distinct) == (0.0, 100)
    assert (swallowed.at_start, swallowed.distinct) == (1.0, 1)
    offset = statistics(vector(updates.bfloat16(), origin=1.0))  # as 1 + w nothing is lost
    assert offset.at_start == 0 and offset.distinct == 100 and abs(offset.mean - 1) < 1e-5
    assert statistics(vector(torch.tensor([0.0, 0.5]), origin=1.0)).at_start == 0.5
    with pytest.raises(ValueError, match=r"layers\.3\.norm"):
        statistics(vector(torch.tensor([1.0, torch.nan])))


def test_inspect_shows_run_or_folder(
    runs: dict[str, Path], tmp_path: Path, answer: Answer, told: Told
) -> None:
    picture = tmp_path / "sub/run.png"
    out = told("inspect", str(runs["own"]), "--png", str(picture)).splitlines()
    at = out.index("layers.*.attn.qkv.q_proj.scale_out: output, stays")
    assert out[0] == "tiny, hg+dnp+or+iwd: scale vectors" and max(map(len, out[:-2])) <= 80
    for layer, line in enumerate(out[at + 1 : at + 3]):
        cells = line.split()
        assert cells[0] == str(layer) and len(cells) == 8 and cells[5:] == ["32", "0.0%", "0.0%"]
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000
    assert main(["export", str(runs["plain"]), str(tmp_path / "hf")]) == 0
    said = answer("inspect", str(tmp_path / "hf"))
    assert [row["name"] for row in said["vectors"]][-1] == "model.norm.weight" and not said["notes"]
    for row in said["vectors"]:
        assert row["at_start"] == 1 and row["folds"]  # folding leaves ones


def test_inspect_names_a_run_as_its_summary(tmp_path: Path, corpus: Path, answer: Answer) -> None:
    args = write_run_args(corpus, tmp_path)
    args += ["--model.scale_options.placement_at", "{lm_head: np}", "--trainer.max_steps", "1"]
    label = answer("fit", *args, "--run_dir", str(tmp_path / "run"))["label"]
    assert "[" in label and answer("inspect", str(tmp_path / "run"))["model"] == f"tiny, {label}"


def test_inspect_own_export_needs_trust(
    tmp_path: Path, config: BackboneConfig, answer: Answer, refused: Refused
) -> None:
    to_hugging_face(perturbed(Backbone(config, "unified"))).save_pretrained(tmp_path)
    assert "--trust_remote_code" in refused("inspect", str(tmp_path))
    vectors = answer("inspect", str(tmp_path), "--trust_remote_code")["vectors"]
    roles = {row["name"].removeprefix("model.layers.1."): row["role"] for row in vectors}
    assert roles["mlp.gate_proj.gamma"] == "output"
    assert roles["post_attention_layernorm.weight"] == "input"


def test_inspect_reads_a_model_with_weights_of_another_head(tmp_path: Path) -> None:
    named("llama").save_pretrained(tmp_path)  # type: ignore[operator]
    file = tmp_path / "model.safetensors"
    of_next_tokens = {"mtp.weight": torch.ones(2)}
    save_file(load_file(file) | of_next_tokens, file, metadata={"format": "pt"})
    assert len(vectors_of_model(load_model(tmp_path)).vectors) == 5


def test_inspect_wrong_input_refused(tmp_path: Path, refused: Refused) -> None:
    def saved(name: str, model: nn.Module, **options: Any) -> Path:
        model.save_pretrained(tmp_path / name, **options)  # type: ignore[operator]
        return tmp_path / name

    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/pytorch_model.bin").write_bytes(b"\x80")
    assert "empty has no config.json" in refused("inspect", str(tmp_path / "empty"))
    model = named("llama")
    whole = saved("whole", model, max_shard_size="30KB")
    assert "expected a file that ends in .png" in refused("inspect", str(whole), "--png", "x.jpg")
    shard = sorted(whole.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:100])
    assert "no language model can be loaded" in refused("inspect", str(whole))
    one = saved("one", model)
    tensors = load_file(one / "model.safetensors")
    tensors["model.norms.weight"] = tensors.pop("model.norm.weight")
    save_file(tensors, one / "model.safetensors", metadata={"format": "pt"})
    assert "no model.norm.weight" in refused("inspect", str(one))
    assert "hf download" in refused("inspect", "my-org/no-folder")
    applied = named("llama")
    apply_strategy(applied, "hg+dp+or")
    assert "no language model can be loaded" in refused("inspect", str(saved("applied", applied)))
    assert "has no scale vectors" in refused("inspect", str(saved("olmo", named("olmo"))))
    family = find("vit")
    vit = family.build()
    assert "vectors_of_model" in refused("inspect", str(saved("vit", vit)))
    assert vectors_of_model(vit, family.example).vectors
