"""The shapes that the signatures of scale/ and nn/ state hold in every call; without jaxtyping they cost nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import BUILDS

ROOT = Path(__file__).parent.parent


@pytest.mark.long
def test_every_call_has_the_shapes_of_its_signature() -> None:
    command = [sys.executable, "-m", "tests.shapes", *BUILDS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 2 * len(BUILDS) + sum("dnp" not in build for build in BUILDS)


def test_float_without_jaxtyping_is_a_tensor() -> None:
    program = (
        "import sys; from lightning_sv.scale.fold import scaled_product; from torch import Tensor\n"
        "assert 'jaxtyping' not in sys.modules and scaled_product.__annotations__['weight'].__origin__ is Tensor"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
