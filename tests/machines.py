"""`make test-machines`: the numerical tests with the kernels of other CPUs, two threads, and random order.

Environment variables choose the kernels of torch, MKL and oneDNN. Variants whose instructions this CPU lacks are left
out. Words choose variants by name, options go to pytest: `python -m tests.machines "2 threads" avx2 -x`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
#: folders that compare numbers
FOLDERS = [
    *(f"lightning_sv/{name}" for name in ("scale", "nn", "theory")),
    *(f"tests/{name}" for name in ("scale", "nn", "optim", "curvature", "theory", "interop", "golden", "callbacks")),
    *(f"tests/lit/test_{name}.py" for name in ("fit", "experts", "probes", "foreign_oracle")),
    "tests/analysis/test_paired.py",
    "tests/analysis/test_scaling.py",
]
#: tests that choose their own kernels, and complete commands
LEFT_OUT = [
    "--deselect=tests/golden/test_golden.py::test_losses_are_golden",
    "--ignore=tests/theory/test_command.py",
]
#: files keep their order, and the tests of a file lose theirs
RANDOM = "--random-order-bucket=module"


class Variant(NamedTuple):
    """A name, the environment it sets, the CPU flag it needs, and arguments for pytest."""

    name: str
    environment: dict[str, str]
    needs: str = ""
    arguments: tuple[str, ...] = ()


ONE = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
VARIANTS = [
    Variant("ATen plain", {"ATEN_CPU_CAPABILITY": "default"}),
    Variant("ATen avx2", {"ATEN_CPU_CAPABILITY": "avx2"}, "avx2"),
    Variant("ATen avx512", {"ATEN_CPU_CAPABILITY": "avx512"}, "avx512f"),
    Variant("BLAS plain", {"MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41", "OPENBLAS_CORETYPE": "Nehalem"}),
    Variant("BLAS avx2", {"MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2", "OPENBLAS_CORETYPE": "Haswell"}, "avx2"),
    Variant("2 threads", {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}),
    Variant("random order, seed 1", {}, arguments=(RANDOM, "--random-order-seed=1")),
    Variant("random order, seed 2", {}, arguments=(RANDOM, "--random-order-seed=2")),
]


def cpu_flags() -> set[str]:
    """Return the instructions of the CPU, or nothing if the system does not list them."""
    info = Path("/proc/cpuinfo")
    lines = re.findall(r"^(?:flags|Features)\s*:(.*)$", info.read_text(), re.MULTILINE) if info.exists() else []
    return set(lines[0].split()) if lines else set()


def run(variant: Variant, options: list[str]) -> int:
    """Return pytest's exit code."""
    threads = int(variant.environment.get("OMP_NUM_THREADS", 1))
    workers = max(1, 2 // threads)  # threads that share a core spin, and a minute becomes ten
    command = [sys.executable, "-m", "pytest", "--tb=short", "--show-capture=no", "-m", "not faults and not hf4"]
    command += ["-n", str(workers), "--dist", "loadfile", *variant.arguments, *LEFT_OUT, *FOLDERS, *options]
    with tempfile.TemporaryDirectory() as cache:  # without it, torch's compiler would reuse kernels of other variants
        environment = os.environ | ONE | {"TORCHINDUCTOR_CACHE_DIR": cache} | variant.environment
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def main(argv: list[str]) -> int:
    """Run the variants and print the table; return 1 if a test failed in any."""
    names, options = ([a for a in argv if a.startswith("-") == dashed] for dashed in (False, True))
    flags, results = cpu_flags(), {}
    for variant in VARIANTS:
        if not names or any(name in variant.name for name in names):
            if variant.needs and variant.needs not in flags:
                results[variant.name] = f"left out: this CPU has no {variant.needs}"
            else:
                results[variant.name] = "failed" if run(variant, options) else "passed"
    for name, result in results.items():
        print(f"{name:24}{result}")
    return int("failed" in results.values() or "passed" not in results.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
