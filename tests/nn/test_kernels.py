"""The switch between plain code and Triton kernels; the kernels themselves run under Triton's interpreter."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from lightning_sv import Backbone, BackboneConfig
from lightning_sv.errors import ConfigError
from lightning_sv.nn import meta_backbone
from lightning_sv.nn.kernels import select
from lightning_sv.nn.kernels.select import use_kernels

ROOT = Path(__file__).parent.parent.parent
has_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton comes with PyTorch's CUDA builds alone")


@has_triton
@pytest.mark.slow
def test_kernels_under_triton_interpreter_equal_plain_forms() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/nn/triton_interpreter.py"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_kernels_without_gpu_or_too_wide_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Backbone(BackboneConfig(d_model=16, n_layer=1, n_head=2, vocab_size=24), "unified")
    plain = model.layers[0].ffn.swiglu_outputs
    use_kernels(model, "plain")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match=r"model\.kernels"):
        use_kernels(model, "triton")
    monkeypatch.setattr(select, "unusable", lambda: None)
    wide = meta_backbone(BackboneConfig(d_model=16, n_layer=1, n_head=2, vocab_size=24, d_ff=8193), "unified")
    with pytest.raises(ConfigError, match="8193"):
        use_kernels(wide, "triton")
    assert model.layers[0].ffn.swiglu_outputs is plain and model.layers[0].attn.norm_rotate is None
