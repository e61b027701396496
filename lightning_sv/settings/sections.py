"""What a run's config holds beside model, data and trainer: each name stands here once. Without Lightning."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

#: sections that make the callbacks of every run -> their class, which `fit` alone imports
CALLBACKS = {
    "scalars": "lightning_sv.callbacks.TrainingMonitor",
    "branch_norms": "lightning_sv.callbacks.BranchNorms",
    "experts": "lightning_sv.callbacks.RouterMonitor",
    "samples": "lightning_sv.lit.text_samples.TextSamples",
    "checkpoint": "lightning_sv.lit.checkpoint.callback.LastCheckpoint",
    "progress": "lightning_sv.callbacks.RunProgress",
}
#: keys that hold further keys
SECTIONS = frozenset(CALLBACKS) | {
    "model", "model.backbone", "model.backbone.router", "model.backbone.rope_scaling", "model.scale_options",
    "model.optim", "model.schedule",
    "data", "data.corpus", "trainer",
}  # fmt: skip
#: keys of one start of a run, its own and LightningCLI's
_START = ("run_dir", "ckpt_path", "extend", "json", "weights_only")


def ignore_keys(parser: "ArgumentParser", sections: Iterable[str] = (), keys: Iterable[str] = ()) -> None:
    """Accept, without a look at it, what a run's config may hold and what does not count here."""
    known = {action.dest for action in parser._actions}
    for kind, names in ((dict, (*CALLBACKS, *sections)), (Any, (*_START, *keys))):
        for name in names:
            if name not in known:
                parser.add_argument(f"--{name}", type=kind, help="Of a training run; not used here.")
