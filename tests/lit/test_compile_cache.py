"""Compiled kernels in one file that another machine takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from lightning_sv.__main__ import main
from lightning_sv.lit.compile_cache import load_compiled, save_compiled


def run_once() -> tuple[int, int]:
    """Kernels that were found, and that were made, of one function."""
    torch._dynamo.reset()
    counters.clear()
    torch.compile(lambda x: (x * 2 + 1).relu())(torch.ones(8))
    return counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]


@pytest.mark.slow
def test_what_one_machine_compiled_another_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "runs" / "cache.bin"
    assert "none yet" in load_compiled(file)
    # Each new folder would try every one. Not config.cpp.vec_isa_ok: this list is made once a process, and code for
    # vectors that another process left in the shared cache would then be compiled without.
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.valid_vec_isa_list", list)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "one"))
    assert run_once() == (0, 1)
    save_compiled(file)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "two"))
    assert "MiB" in load_compiled(file)
    assert run_once() == (1, 0)
    assert [path.name for path in file.parent.iterdir()] == ["cache.bin"]


def test_a_file_that_is_no_cache_is_refused_before_the_first_step(
    run_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cache.bin"
    file.write_bytes(b"\x07" * 40)
    assert main(["fit", *run_args, "--compile_cache", str(file), "--run_dir", str(tmp_path / "run")]) == 2
    assert f"compile_cache {file} cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
