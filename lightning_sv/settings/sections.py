"""Sections of a run's config, and their dotted keys."""

from collections.abc import Mapping
from typing import Any

#: section of a callback of every run -> its class, which only `fit` imports
CALLBACKS = {
    "scalars": "lightning_sv.callbacks.TrainingMonitor",
    "branch_norms": "lightning_sv.callbacks.BranchNorms",
    "experts": "lightning_sv.callbacks.RouterMonitor",
    "samples": "lightning_sv.lit.text_samples.TextSamples",
    "checkpoint": "lightning_sv.lit.checkpoint.last_checkpoint.LastCheckpoint",
    "progress": "lightning_sv.callbacks.RunProgress",
}
#: keys that contain further keys
SECTIONS = frozenset(CALLBACKS) | {
    "model", "model.backbone", "model.backbone.router", "model.backbone.rope_scaling",
    "model.scale_options", "model.optim", "model.schedule",
    "data", "data.corpus", "trainer",
}  # fmt: skip


def without_empty(content: dict[Any, Any], prefix: str = "") -> dict[Any, Any]:
    """Remove empty sections of a run's config, which would reset those of earlier files.

    >>> without_empty({"trainer": None, "model": {"optim": None, "seed": None}})
    {'model': {'seed': None}}
    """
    kept = {}
    for name, value in content.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            kept[name] = without_empty(value, f"{key}.")
        elif value is not None or key not in SECTIONS:
            kept[name] = value
    return kept


def leaves(content: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return the dotted keys of nested sections with their values."""
    values: dict[str, Any] = {}
    for name, child in content.items():
        key = f"{prefix}{name}"
        if isinstance(child, Mapping):
            values |= leaves(child, f"{key}.")
        else:
            values[key] = child
    return values


def keys_in_sections(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted keys, with the entries of a section in place of the section.

    `fit` merges a section into that of the files, so only its entries say what a run is.

    >>> keys_in_sections({"model.optim": {"lr": 1.0}, "trainer.strategy": {"class_path": "A"}})
    {'model.optim.lr': 1.0, 'trainer.strategy': {'class_path': 'A'}}
    """
    entries: dict[str, Any] = {}
    for key, value in keys.items():
        if key not in SECTIONS or not isinstance(value, Mapping):
            entries[key] = value
            continue
        children = {f"{key}.{name}": child for name, child in value.items()}
        entries |= keys_in_sections(children)
    return entries
