"""`python -m tests.shapes BUILD ...`: run strategies of every family with all shapes checked.

It needs its own process: jaxtyping wraps functions at import, and compilers would see the wrappers.
"""

import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from jaxtyping import TypeCheckError, install_import_hook

with install_import_hook(["lightning_sv.scale", "lightning_sv.nn"], "beartype.beartype"):
    from lightning_sv.nn import Backbone, BackboneConfig, document_ids
    from lightning_sv.scale import ScaleOptions
    from lightning_sv.scale.fold import effective_weight

from tests.conftest import GEMMA, MOE

CONFIG = BackboneConfig(d_model=32, n_layer=1, n_head=2, vocab_size=48)


def every_model(builds: Sequence[str]) -> int:
    """Run the models; return how many there are (Q/K-norm and `dnp` do not go together)."""
    tokens, n = torch.randint(0, CONFIG.vocab_size, (3, 17)), 0
    for family in ({}, GEMMA, MOE):
        for build in builds:
            if family is GEMMA and "dnp" in build:
                continue
            model = Backbone(replace(CONFIG, **family), build, ScaleOptions(share_scale_out=n % 2 == 1))
            model(tokens[:, :-1], document_ids(tokens[:, :-1], eot=0))
            model(tokens[:, :-1], targets=tokens[:, 1:]).backward()
            n += 1
    return n


def wrong_shapes_are_refused() -> None:
    """Check that the import hook is active: torch itself broadcasts these arguments."""
    for gamma in (torch.ones(1), torch.ones(6, 4)):
        with pytest.raises(TypeCheckError):
            effective_weight(torch.ones(6, 4), gamma, None)


if __name__ == "__main__":
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "scale strategy")  # strategies that are the same model
    wrong_shapes_are_refused()
    print(every_model(sys.argv[1:]))
