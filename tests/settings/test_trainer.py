"""The Trainer's keys, read from its source: the same as in its signature."""

import inspect
from dataclasses import fields

import lightning as L

from lightning_sv.settings.trainer import DERIVED, TRAINER_DEFAULTS, trainer_keys


def test_the_keys_and_defaults_are_lightnings() -> None:
    signature = inspect.signature(L.Trainer.__init__).parameters
    theirs = {name: parameter.default for name, parameter in signature.items() if name != "self"}
    assert {field.name: field.default for field in fields(trainer_keys())} == theirs
    types = {field.name: field.type for field in fields(trainer_keys())}
    for name in ("max_steps", "devices", "precision", "max_time", "val_check_interval", "deterministic"):
        assert types[name] == signature[name].annotation, name
    assert {*DERIVED, *TRAINER_DEFAULTS} <= set(theirs)
