"""`make test-machines`: the numerical part of the suite as other machines compute it, and in other orders.

Each variant is the numerical folders in a process of their own, with the switches that decide torch's, MKL's and
oneDNN's kernels. A variant whose instructions this CPU lacks is left out, and the table says so. Words on the command
line choose variants by name, and options go to pytest: `python -m tests.machines "2 threads" avx2 -x`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
#: where numbers are compared
FOLDERS = [
    *(f"lightning_sv/{room}" for room in ("scale", "nn", "theory")),
    *(f"tests/{room}" for room in ("scale", "nn", "optim", "curvature", "theory", "interop", "golden", "callbacks")),
    *(f"tests/lit/test_{name}.py" for name in ("fit", "experts", "probes", "foreign_oracle")),
    "tests/analysis/test_paired.py",
    "tests/analysis/test_scaling.py",
]
#: what chooses its own kernels, and whole commands that other tests take apart
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
    """What the CPU can do; empty where the system does not say."""
    try:
        (line, *_) = re.findall(r"^(?:flags|Features)\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except (OSError, ValueError):
        return set()
    return set(line.split())


def run(variant: Variant, options: list[str]) -> tuple[int, dict[str, int]]:
    """Return pytest's exit code and how many tests passed and failed, after showing those."""
    threads = int(variant.environment.get("OMP_NUM_THREADS", 1))
    workers = str(max(1, 2 // threads))  # threads that share a core spin, and a minute becomes ten
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--tb=short",
        "--show-capture=no",
        "-m",
        "not faults and not hf4",
        "-n",
        workers,
        "--dist",
        "loadfile",
    ]
    with tempfile.TemporaryDirectory() as cache:  # torch's compiler would take kernels of another variant from its own
        environment = os.environ | ONE | {"TORCHINDUCTOR_CACHE_DIR": cache} | variant.environment
        done = subprocess.run(
            [*command, *variant.arguments, *LEFT_OUT, *FOLDERS, *options],
            cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
    if done.returncode:
        print(done.stdout[-20_000:] + done.stderr[-2_000:], flush=True)
    summary = done.stdout.strip().rpartition("\n")[2]
    return done.returncode, {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|error)", summary)}


def main(argv: list[str]) -> int:
    """Run the variants and print the table; 1 if a test failed in any."""
    names, options = ([a for a in argv if a.startswith("-") == dashed] for dashed in (False, True))
    flags, rows, fine = cpu_flags(), [], True
    for variant in VARIANTS:
        if names and not any(name in variant.name for name in names):
            continue
        if variant.needs and variant.needs not in flags:
            rows.append((variant.name, "", "", f"left out: this CPU has no {variant.needs}"))
            continue
        start = time.monotonic()
        code, counts = run(variant, options)
        fine &= code == 0 and "passed" in counts
        wrong = counts.get("failed", 0) + counts.get("error", 0)
        rows.append((variant.name, counts.get("passed", 0), wrong, f"{time.monotonic() - start:.0f}"))
        print("{}: {} passed, {} failed in {} s".format(*rows[-1]), flush=True)
    print(f"\n{'variant':24}{'passed':>8}{'failed':>8}  seconds")
    for name, passed, wrong, seconds in rows:
        print(f"{name:24}{passed:>8}{wrong:>8}  {seconds}")
    return int(not (fine and rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
