"""The Trainer's keys, written out so that they are known without importing it."""

import inspect
from dataclasses import fields

import lightning as L

from lightning_sv.settings.trainer import DERIVED, TRAINER_DEFAULTS, TrainerKeys


def test_the_keys_and_defaults_are_lightnings() -> None:
    signature = inspect.signature(L.Trainer.__init__).parameters
    theirs = {name: parameter.default for name, parameter in signature.items() if name != "self"}
    assert {field.name: field.default for field in fields(TrainerKeys)} == theirs
    assert {*DERIVED, *TRAINER_DEFAULTS} <= set(theirs)
