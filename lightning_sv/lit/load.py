"""What a checkpoint says about its model, read without executing anything that it names."""

from typing import Any

import torch

from lightning_sv.nn import Backbone, BackboneConfig
from lightning_sv.scale import ScaleOptions

#: key of a checkpoint under which `PretrainModule` describes the backbone
CHECKPOINT_KEY = "lightning_sv"
#: and under which it keeps the states of the random number generators
RNG_KEY = "rng_states"


def check_checkpoint(path: str) -> dict[str, Any]:
    """Read a checkpoint on the CPU, without executing anything it names.

    Raises:
        ValueError: the file is missing, damaged, or was not written by `PretrainModule`.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError as error:
        raise ValueError(f"no checkpoint at {path}; give a run directory that holds one.") from error
    except Exception as error:
        raise ValueError(f"{path} is not a readable checkpoint ({type(error).__name__}).") from error
    if not isinstance(checkpoint, dict) or CHECKPOINT_KEY not in checkpoint:
        raise ValueError(f"{path} was not written by lightning_sv: it has no {CHECKPOINT_KEY!r} entry.")
    return checkpoint


def load_backbone(path: str) -> Backbone:
    """Rebuild the backbone of a checkpoint, on the CPU, without its optimizer.

    Raises:
        ValueError: see `check_checkpoint`.
    """
    checkpoint = check_checkpoint(path)
    made = checkpoint[CHECKPOINT_KEY]
    model = Backbone(BackboneConfig(**made["backbone"]), made["scale"], ScaleOptions(**made["scale_options"]))
    prefix = "backbone."
    weights = {
        name.removeprefix(prefix): value for name, value in checkpoint["state_dict"].items() if name.startswith(prefix)
    }
    model.load_state_dict(weights)
    return model
