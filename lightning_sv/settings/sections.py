"""Sections of a run's config besides model, data and trainer."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

#: section of a callback of every run -> its class, which only `fit` imports
CALLBACKS = {
    "scalars": "lightning_sv.callbacks.TrainingMonitor",
    "branch_norms": "lightning_sv.callbacks.BranchNorms",
    "experts": "lightning_sv.callbacks.RouterMonitor",
    "samples": "lightning_sv.lit.text_samples.TextSamples",
    "checkpoint": "lightning_sv.lit.checkpoint.callback.LastCheckpoint",
    "progress": "lightning_sv.callbacks.RunProgress",
}
#: keys that contain further keys
SECTIONS = frozenset(CALLBACKS) | {
    "model", "model.backbone", "model.backbone.router", "model.backbone.rope_scaling", "model.scale_options",
    "model.optim", "model.schedule",
    "data", "data.corpus", "trainer",
}  # fmt: skip
#: keys of a single start of a run: ours and LightningCLI's
_START = ("run_dir", "ckpt_path", "extend", "json", "weights_only")


def ignore_keys(parser: "ArgumentParser", sections: Iterable[str] = (), keys: Iterable[str] = ()) -> None:
    """Accept keys of a run's config that the command does not use, without checking their values."""
    known = {action.dest for action in parser._actions}
    for kind, names in ((dict, (*CALLBACKS, *sections)), (Any, (*_START, *keys))):
        for name in (name for name in names if name not in known):
            parser.add_argument(f"--{name}", type=kind, help="Of a training run; not used here.")
