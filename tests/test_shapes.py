"""The shapes that the signatures of scale/ and nn/ state hold in every call; without jaxtyping they
cost nothing.

`python -m tests.test_shapes BUILD ...` runs strategies of every family with all shapes checked. It
needs its own process: jaxtyping wraps functions at import, and compilers would see the wrappers.
"""

import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent


@pytest.mark.long
def test_calls_have_the_shapes_of_their_signatures() -> None:
    from tests.conftest import BUILDS

    command = [sys.executable, "-m", "tests.test_shapes", *BUILDS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 2 * len(BUILDS) + sum("dnp" not in build for build in BUILDS)


def run_models(builds: Sequence[str]) -> int:
    """Run the models; return how many there are (Q/K-norm and `dnp` do not go together)."""
    from jaxtyping import TypeCheckError, install_import_hook

    with install_import_hook(["lightning_sv.scale", "lightning_sv.nn"], "beartype.beartype"):
        from lightning_sv.nn import Backbone, BackboneConfig, document_ids
        from lightning_sv.scale.definitions import effective_weight
    from tests.conftest import GEMMA, MOE

    for gamma in (
        torch.ones(1),
        torch.ones(6, 4),
    ):  # torch itself broadcasts these, so the hook is active
        with pytest.raises(TypeCheckError):
            effective_weight(torch.ones(6, 4), gamma, None)
    config = BackboneConfig(d_model=32, n_layer=1, n_head=2, vocab_size=48)
    tokens = torch.randint(0, config.vocab_size, (3, 17))
    n = 0
    for family in ({}, GEMMA, MOE):
        for build in builds:
            if family is GEMMA and "dnp" in build:
                continue
            model = Backbone(replace(config, **family), build)
            model(tokens[:, :-1], document_ids(tokens[:, :-1], eot=0))
            model(tokens[:, :-1], targets=tokens[:, 1:]).backward()
            n += 1
    return n


if __name__ == "__main__":
    warnings.simplefilter("error")
    print(run_models(sys.argv[1:]))
