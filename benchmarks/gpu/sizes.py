"""Timed models: those of conf/model, and one for the test suite."""

from dataclasses import dataclass, replace
from typing import Any

import yaml

from benchmarks.gpu.process import ROOT
from lightning_sv.nn import BackboneConfig

#: arms of the paper's overhead; if memory is short, the last are skipped
ARMS = ("llama", "unified", "hg+dp+or", "hg")


@dataclass(frozen=True)
class Size:
    """A model and its batches.

    Attributes:
        config: configuration of the backbone.
        seq_len: tokens per sequence.
        batches: name -> sequences per micro-batch, the one for comparisons first.
    """

    config: BackboneConfig
    seq_len: int
    batches: dict[str, int]

    def shallow(self) -> "Size":
        """Return it with one block: it compiles the same code in less memory."""
        return replace(self, config=replace(self.config, n_layer=1))


#: name -> (file in conf/model, micro-batches). 'protocol' at 1B is the paper's, and everywhere
#: 8,192 tokens.
_SIZES: dict[str, tuple[str, dict[str, int]]] = {
    "0.12b": ("llama-0.12b", {"protocol": 8, "large": 32}),
    "1b": ("llama-1b", {"protocol": 2, "large": 8}),
    "moe-0.25b": ("moe-0.25b", {"protocol": 8, "large": 32}),
}
_TOY: dict[str, Any] = {"name": "toy", "d_model": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64}


def size_of(name: str, toy: bool = False) -> Size:
    """Return the size of this name; with toy, a small model of the same kind."""
    file, batches = _SIZES[name]
    if toy:
        more = {"n_expert": 6, "n_expert_active": 2} if name.startswith("moe") else {}
        return Size(BackboneConfig(**_TOY, **more), 16, {"protocol": 2, "large": 4})
    with (ROOT / "conf/model" / f"{file}.yaml").open() as stream:
        content = yaml.safe_load(stream)
    return Size(BackboneConfig(**content["model"]["backbone"]), content["data"]["seq_len"], batches)
