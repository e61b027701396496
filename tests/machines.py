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
    *(f"lightning_sv/{name}" for name in ("scale", "nn", "theory")),
    *(
        f"tests/{name}"
        for name in (
            "scale",
            "nn",
            "optim",
            "curvature",
            "theory",
            "interop",
            "golden",
            "callbacks",
        )
    ),
    *(f"tests/lit/test_{name}.py" for name in ("fit", "probes", "foreign_oracle")),
    "tests/statistics/test_paired.py",
    "tests/statistics/test_scaling.py",
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
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--tb=short",
        "--show-capture=no",
        "-m",
        "not faults and not hf4",
    ]
    command += ["-n", str(workers), "--dist", "loadfile", *LEFT_OUT, *FOLDERS, *options]
    with (
        tempfile.TemporaryDirectory() as cache
    ):  # without it, torch's compiler would reuse kernels of other variants
        one = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": cache}
        return subprocess.run(
            command, cwd=ROOT, env=os.environ | one | variant, check=False
        ).returncode


def main(argv: list[str]) -> int:
    """Run the variants and print the table; return 1 if a test failed in any."""
    names, options = ([a for a in argv if a.startswith("-") == dashed] for dashed in (False, True))
    cpu = Path("/proc/cpuinfo")
    results = {}
    flags = cpu.read_text() if cpu.exists() else ""
    for name, variant in VARIANTS.items():
        if not names or any(word in name for word in names):
            needed = name.split()[-1]
            if needed.startswith("avx") and needed not in flags:
                results[name] = f"left out: this CPU has no {needed}"
            else:
                results[name] = "failed" if run(variant, options) else "passed"
    for name, result in results.items():
        print(f"{name:24}{result}")
    return int("failed" in results.values() or "passed" not in results.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
