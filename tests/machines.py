"""`python -m tests.machines`: the numerical tests with the kernels of other CPUs, two threads, and
random order.

Environment variables choose the kernels of torch, MKL and oneDNN. Variants whose instructions this
CPU lacks are left out. Words choose variants by name, options go to pytest: `python -m
tests.machines "2 threads" avx2 -x`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: folders that compare numbers
FOLDERS = [
    "lightning_sv/scale",
    "lightning_sv/nn",
    "lightning_sv/theory",
    "tests/scale",
    "tests/nn",
    "tests/optim",
    "tests/curvature",
    "tests/theory",
    "tests/interop",
    "tests/golden",
    "tests/callbacks",
    "tests/lit/test_fit.py",
    "tests/lit/test_probes.py",
    "tests/lit/test_foreign_oracle.py",
    "tests/statistics",
]
#: tests that choose their own kernels, and complete commands
LEFT_OUT = [
    "--deselect=tests/golden/test_golden.py::test_losses_on_recorded_machine_are_golden",
    "--ignore=tests/theory/test_command.py",
]
#: files keep their order, and the tests of a file lose theirs
RANDOM = "--random-order-bucket=module --random-order-seed="
#: name -> environment; the last word of a name may be instructions that the CPU needs
VARIANTS = {
    "ATen plain": {"ATEN_CPU_CAPABILITY": "default"},
    "ATen avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "ATen avx512": {"ATEN_CPU_CAPABILITY": "avx512"},
    "BLAS plain": {
        "MKL_CBWR": "COMPATIBLE",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "OPENBLAS_CORETYPE": "Nehalem",
    },
    "BLAS avx2": {"MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2", "OPENBLAS_CORETYPE": "Haswell"},
    "2 threads": {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"},
    "random order, seed 1": {"PYTEST_ADDOPTS": f"{RANDOM}1"},
    "random order, seed 2": {"PYTEST_ADDOPTS": f"{RANDOM}2"},
}


def run(variant: dict[str, str], options: list[str]) -> int:
    threads = int(variant.get("OMP_NUM_THREADS", 1))
    workers = max(1, 2 // threads)  # threads that share a core spin, and a minute becomes ten
    pytest = f"-m pytest --tb=short --show-capture=no -n {workers} --dist loadfile".split()
    marks = ["-m", "not faults and not hf4"]
    command = [sys.executable, *pytest, *marks, *LEFT_OUT, *FOLDERS, *options]
    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    # With a shared cache, torch's compiler would reuse kernels of other variants.
    with tempfile.TemporaryDirectory() as cache:
        env = os.environ | one_thread | {"TORCHINDUCTOR_CACHE_DIR": cache} | variant
        return subprocess.run(command, cwd=ROOT, env=env, check=False).returncode


def missing_instructions(variant: str) -> str | None:
    """Return the instructions that a variant's name ends with and this CPU lacks."""
    instructions = variant.split()[-1]
    if not instructions.startswith("avx"):
        return None
    cpu = Path("/proc/cpuinfo")
    if cpu.exists() and instructions in cpu.read_text():
        return None
    return instructions


def outcome(name: str, options: list[str]) -> str:
    """Run a variant; return what the table says about it."""
    missing = missing_instructions(name)
    if missing:
        return f"left out: this CPU has no {missing}"
    return "failed" if run(VARIANTS[name], options) else "passed"


def chosen_variants(words: list[str]) -> list[str]:
    """Return the variants whose name contains one of the words; all, if there are no words."""
    if not words:
        return list(VARIANTS)
    return [name for name in VARIANTS if any(word in name for word in words)]


def main(argv: list[str]) -> int:
    """Run the variants and print the table; return 1 unless tests ran and passed in all."""
    options = [word for word in argv if word.startswith("-")]
    words = [word for word in argv if not word.startswith("-")]
    results = {name: outcome(name, options) for name in chosen_variants(words)}
    for name, result in results.items():
        print(f"{name:24}{result}")
    failed = "failed" in results.values()
    ran = "passed" in results.values()
    return int(failed or not ran)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
