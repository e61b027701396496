"""`lightning-sv roles`: its table, its JSON, and refused inputs."""

import re
from functools import partial
from pathlib import Path

import pytest

from lightning_sv.cli.roles import print_patterns, print_roles
from lightning_sv.roles import ModelParameter, Roles
from tests.conftest import Answer, Refused, Told, edit_json, thinned
from tests.roles.families import find

transformers = pytest.importorskip("transformers")


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A directory as save_pretrained leaves it, but for the weights."""
    find("gemma3_text").build().config.save_pretrained(tmp_path)
    return tmp_path


def test_roles_json_has_parameters_and_patterns(
    model_dir: Path, answer: Answer, told: Told
) -> None:
    family = find("gemma3_text")
    model = family.build()
    truth = {name: family.truth(name, p) for name, p in model.named_parameters()}
    spared = {name for name, role in truth.items() if role == "output"}
    for where in (model_dir, model_dir / "config.json"):
        found = answer("roles", str(where))
        rows = {row["name"]: row for row in found["parameters"]}
        assert {name: row["role"] for name, row in rows.items()} == truth
        assert spared == {name for name, row in rows.items() if not row["decays"]}
        pattern = re.compile("|".join(found["undecayed"]))
        assert spared == set(filter(pattern.search, rows))
    assert answer("roles", str(model_dir), "--policy", "wd")["undecayed"] == []
    lines = told("roles", str(model_dir)).splitlines()
    assert {f"  {pattern}" for pattern in found["undecayed"]} <= set(lines)
    assert max(map(len, lines)) <= 80


def test_roles_control_characters_removed(capsys: pytest.CaptureFixture[str]) -> None:
    roles = Roles((ModelParameter("a\x1b[2J.weight", (2,), "output", False, 0.0),))
    for print_them in (partial(print_roles, "M\x9b1m"), print_patterns):
        print_them(roles, "iwd")
        out = capsys.readouterr().out
        assert "weight" in out and not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", out)


def test_roles_table_fixed_parameter_has_a_row_of_its_own() -> None:
    trained = ModelParameter("layers.0.norm.weight", (2,), "input", True, 0.0)
    fixed = ModelParameter("layers.1.norm.weight", (2,), "input", True, 0.0, trained=False)
    rows = [line.split() for line in f"{Roles((trained, fixed))}".splitlines()]
    decays = [row[-1] for row in rows if row[:1] == ["norm.weight"]]
    assert decays == ["yes", "fixed"]


@pytest.mark.parametrize(
    "name", thinned(["t5", "llava", "gemma3", "whisper", "vit"], ["t5", "whisper"])
)
def test_roles_configured_class_is_built(name: str, tmp_path: Path, answer: Answer) -> None:
    model = find(name).build()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    found = answer("roles", str(tmp_path))["parameters"]
    assert {row["name"] for row in found} == {name for name, _ in model.named_parameters()}


def test_roles_unused_parameter_refused(tmp_path: Path, answer: Answer, refused: Refused) -> None:
    config = transformers.Dinov2Config(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, image_size=14
    )
    config.architectures = ["Dinov2ForImageClassification"]
    config.save_pretrained(tmp_path)
    name = "dinov2.embeddings.mask_token"
    assert f"parameter {name} is not used in the traced forward pass" in refused(
        "roles", str(tmp_path)
    )
    assert f"--role is {name}=token; expected" in refused(
        "roles", str(tmp_path), "--role", f"{name}=token"
    )
    found = answer("roles", str(tmp_path), "--role", f"{name}=other")["parameters"]
    roles = {row["name"]: row["role"] for row in found}
    assert (
        roles[name] == "other"
        and roles["dinov2.encoder.layer.0.layer_scale1.lambda1"] == "multiplier"
    )


def test_roles_inputs_that_a_config_does_not_give_are_refused(
    tmp_path: Path, refused: Refused
) -> None:
    config = find("gemma3").build().config
    config.architectures = ["Gemma3ForConditionalGeneration"]
    config.mm_tokens_per_image = 100  # more than the image has patches
    config.save_pretrained(tmp_path)
    assert "accepts no image" in refused("roles", str(tmp_path))
    config = transformers.SpeechT5Config(
        hidden_size=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
    )
    config.architectures = ["SpeechT5ForSpeechToText"]
    config.save_pretrained(tmp_path)
    assert "needs input_values" in refused("roles", str(tmp_path))


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
from pathlib import Path
Path({ran!r}).touch()
class OwnConfig(LlamaConfig):
    model_type = "own-llama"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_roles_remote_code_runs_only_if_trusted(
    tmp_path: Path, answer: Answer, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    ran = tmp_path / "ran"
    own = tmp_path / "own"
    llama = find("llama").build()
    llama.config.save_pretrained(own)
    (own / "modeling_own.py").write_text(CODE.format(ran=str(ran)))
    auto = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    edit_json(
        own / "config.json",
        model_type="own-llama",
        auto_map=auto,
        architectures=["OwnModelForCausalLM"],
    )
    assert "--trust_remote_code" in refused("roles", str(own))
    assert not ran.exists()
    found = answer("roles", str(own), "--trust_remote_code")["parameters"]
    assert ran.exists() and len(found) == len(list(llama.parameters()))


@pytest.mark.parametrize("key", ["num_hidden_layers", "encoder_layers"])
def test_roles_depth_refused_before_the_model_is_built(
    key: str, model_dir: Path, refused: Refused
) -> None:
    config = model_dir / "config.json"
    edit_json(config, **{key: 1_000_000})
    assert f"{key} is 1000000; expected at most" in refused("roles", str(model_dir))
    edit_json(config, **{key: 2}, text_config={key: 1_000_000})
    assert f"text_config: {key} is 1000000" in refused("roles", str(model_dir))


def test_roles_wrong_input_refused(model_dir: Path, tmp_path: Path, refused: Refused) -> None:
    empty = tmp_path / "empty"
    config = model_dir / "config.json"
    empty.mkdir()
    assert "config.json" in refused("roles", str(empty))
    assert "nowhere.json cannot be read" in refused("roles", str(tmp_path / "nowhere.json"))
    assert "expected a model's directory or its config.json" in refused(
        "roles", str(tmp_path / "pytorch_model.bin")
    )
    assert "--policy" in refused("roles", str(model_dir), "--policy", "idw")
    edit_json(config, num_attention_heads=5, num_key_value_heads=3)
    assert "the model cannot be built" in refused("roles", str(model_dir))
    edit_json(config, model_type="no-such-type")
    assert "no-such-type" in refused("roles", str(model_dir))
    edit_json(config, model_type=None)
    assert "model_type" in refused("roles", str(model_dir))
    config.write_text("{")
    assert "config.json cannot be read" in refused("roles", str(model_dir))
