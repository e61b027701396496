"""Models of a config.json without weights, the table of their roles, and refused inputs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_sv.errors import ConfigError
from lightning_sv.roles import ModelParameter, Roles, weight_decay_roles
from lightning_sv.roles.fake import model_from_config
from tests.conftest import edit_json, thinned
from tests.roles.families import find, image

transformers = pytest.importorskip("transformers")


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A directory as save_pretrained leaves it, but for the weights."""
    find("gemma3_text").build().config.save_pretrained(tmp_path)
    return tmp_path


def test_roles_table_has_one_row_per_kind_and_a_frozen_one() -> None:
    trained = ModelParameter("layers.0.norm.weight", (2,), "input", True, 0.0)
    more = ModelParameter("layers.1.norm.weight", (2,), "input", True, 0.0)
    frozen = ModelParameter("layers.2.norm.weight", (2,), "input", True, 0.0, trained=False)
    _, *rows = f"{Roles((trained, more, frozen))}".splitlines()
    assert [row.split() for row in rows] == [
        ["layers.*.norm.weight", "2", "2", "input", "yes", "0", "yes"],
        ["layers.*.norm.weight", "1", "2", "input", "yes", "0", "frozen"],
    ]


@pytest.mark.parametrize(
    "name", thinned(["t5", "llava", "gemma3", "whisper", "vit"], ["t5", "whisper"])
)
def test_model_from_config_configured_class_is_built(name: str, tmp_path: Path) -> None:
    model = find(name).build()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    found = dict(model_from_config(tmp_path).named_parameters())
    assert found.keys() == dict(model.named_parameters()).keys()


def test_weight_decay_roles_unused_parameter_refused() -> None:
    config = transformers.Dinov2Config(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, image_size=14
    )
    model = transformers.Dinov2ForImageClassification(config)
    name = "dinov2.embeddings.mask_token"
    with pytest.raises(ConfigError, match=name):
        weight_decay_roles(model, image(14))
    roles = weight_decay_roles(model, image(14), known={name: "other"})
    assert roles[name].role == "other"
    assert roles["dinov2.encoder.layer.0.layer_scale1.lambda1"].role == "multiplier"


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
from pathlib import Path
Path({ran!r}).touch()
class OwnConfig(LlamaConfig):
    model_type = "own-llama"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_model_from_config_remote_code_runs_only_if_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    with pytest.raises(ConfigError, match="--trust_remote_code"):
        model_from_config(own)
    assert not ran.exists()
    found = model_from_config(own, trust_remote_code=True)
    assert ran.exists() and len(list(found.parameters())) == len(list(llama.parameters()))


@pytest.mark.parametrize(
    "names", [[None], ["PreTrainedModel"], ["NoModel"], "Gemma", {"a": 1}, 5, []]
)
def test_model_from_config_without_a_usable_class_is_a_causal_model(
    names: object, model_dir: Path
) -> None:
    edit_json(model_dir / "config.json", architectures=names)
    assert type(model_from_config(model_dir)).__name__ == "Gemma3ForCausalLM"


@pytest.mark.parametrize(("change", "expected"), [
    (lambda config: edit_json(config, num_attention_heads=5, num_key_value_heads=3), "the model cannot be built"),
    (lambda config: edit_json(config, model_type="no-such-type"), "no-such-type"),
    (lambda config: edit_json(config, model_type=None), "model_type"),
    (lambda config: config.write_text("{"), r"config\.json"),
    (lambda config: config.unlink(), r"config\.json"),
])  # fmt: skip
def test_model_from_config_wrong_config_refused(
    change: Callable[[Path], object], expected: str, model_dir: Path
) -> None:
    change(model_dir / "config.json")
    with pytest.raises(ConfigError, match=expected):
        model_from_config(model_dir)
