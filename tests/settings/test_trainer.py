"""The Trainer's keys, read from its source: the same as in its signature."""

import inspect
from dataclasses import fields

import lightning as L

from lightning_sv.settings.trainer import DERIVED, TRAINER_DEFAULTS, trainer_keys


def test_trainer_keys_equal_the_signature() -> None:
    signature = inspect.signature(L.Trainer).parameters
    keys = {field.name: field for field in fields(trainer_keys())}
    assert {name: key.default for name, key in keys.items()} == {name: p.default for name, p in signature.items()}
    for name in ("max_steps", "devices", "precision", "max_time", "val_check_interval", "deterministic"):
        assert keys[name].type == signature[name].annotation, name
    assert {*DERIVED, *TRAINER_DEFAULTS} <= set(signature)
