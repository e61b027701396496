"""The table of roles, and a parameter that the pass does not use."""

import pytest

from lightning_sv.errors import ConfigError
from lightning_sv.roles import ModelParameter, Roles, weight_decay_roles
from tests.roles.families import image

transformers = pytest.importorskip("transformers")


def test_roles_table_has_one_row_per_kind_and_a_frozen_one() -> None:
    trained = ModelParameter("layers.0.norm.weight", (2,), "input", True, 0.0)
    more = ModelParameter("layers.1.norm.weight", (2,), "input", True, 0.0)
    frozen = ModelParameter("layers.2.norm.weight", (2,), "input", True, 0.0, trained=False)
    _, *rows = f"{Roles((trained, more, frozen))}".splitlines()
    assert [row.split() for row in rows] == [
        ["layers.*.norm.weight", "2", "2", "input", "yes", "0", "yes"],
        ["layers.*.norm.weight", "1", "2", "input", "yes", "0", "frozen"],
    ]


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
