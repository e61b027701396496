"""`make test-machines`: the numerical part of the suite as other machines compute it, and in other orders.

Each variant is the numerical folders in a process of their own, with the switches that decide torch's, MKL's and
oneDNN's kernels. A variant whose instructions this CPU lacks is left out, and the table says so. Words on the command
line choose variants by name: `python -m tests.machines "2 threads" "avx2"`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
#: where numbers are compared; the golden losses choose their own kernels
FOLDERS = [
    *(f"lightning_sv/{room}" for room in ("scale", "nn", "theory")),
    *(f"tests/{room}" for room in ("scale", "nn", "optim", "curvature", "theory", "interop", "golden", "callbacks")),
    *(f"tests/lit/test_{name}.py" for name in ("fit", "experts", "probes", "foreign_oracle")),
    "tests/corpus/test_ngram.py",
    "tests/paper/test_stats.py",
    "tests/paper/test_scaling.py",
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
    Variant("MKL compatible, oneDNN SSE4.1", {"MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}),
    Variant("MKL avx2, oneDNN avx2", {"MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}, "avx2"),
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


def run(variant: Variant) -> tuple[int, str]:
    """Return pytest's exit code and its summary, after showing what failed."""
    command = [sys.executable, "-m", "pytest", "--tb=short", *variant.arguments, *FOLDERS]
    environment = os.environ | ONE | variant.environment
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout[-20_000:] + done.stderr[-2_000:], flush=True)
    return done.returncode, done.stdout


def main(words: list[str]) -> int:
    """Run the variants and print the table; 1 if a test failed in any."""
    flags, rows, failed = cpu_flags(), [], False
    for variant in VARIANTS:
        if words and not any(word in variant.name for word in words):
            continue
        if variant.needs and variant.needs not in flags:
            rows.append((variant.name, "-", "-", f"left out: this CPU has no {variant.needs}"))
            continue
        start = time.monotonic()
        code, output = run(variant)
        counts = [sum(map(int, re.findall(rf"(\d+) {word}", output.splitlines()[-1]))) for word in ("passed", "failed")]
        failed |= code != 0
        rows.append((variant.name, *map(str, counts), f"{time.monotonic() - start:.0f}" + " (pytest failed)" * (code > 1)))
        print(f"{variant.name}: {counts[0]} passed, {counts[1]} failed", flush=True)
    print(f"\n{'variant':32}{'passed':>8}{'failed':>8}  seconds")
    for name, passed, wrong, seconds in rows:
        print(f"{name:32}{passed:>8}{wrong:>8}  {seconds}")
    return int(failed or not rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
