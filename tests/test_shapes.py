"""The shapes that the signatures of scale/ and nn/ state hold in every call; without jaxtyping they cost nothing."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conftest import BUILDS, FEW_BUILDS

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.parametrize(
    "builds", [FEW_BUILDS[2:3], pytest.param(BUILDS, marks=pytest.mark.long)], ids=["few", "every"]
)
def test_every_call_has_the_shapes_of_its_signature(builds: Sequence[str]) -> None:
    command = [sys.executable, "-m", "tests.shapes", *builds]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 2 * len(builds) + sum("dnp" not in build for build in builds)


def test_without_jaxtyping_an_annotation_is_a_tensor() -> None:
    program = (
        "import sys; from lightning_sv.scale.fold import scaled_product; from torch import Tensor\n"
        "assert 'jaxtyping' not in sys.modules and scaled_product.__annotations__['weight'] is Tensor"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
