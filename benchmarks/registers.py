"""Registers and spills of our Triton kernels on an H100 or H200 (sm_90), from triton's ptxas, without a GPU.

    python -m benchmarks.registers

A multiprocessor has 65,536 registers and up to 2,048 threads. Bytes of stack are a thread's spilled registers.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

#: widths of the paper's models: Llama-0.12B, 0.25B, 0.5B and 1B (and 64 wide heads, as all of them have)
WIDTHS = (2_048, 2_730, 3_413, 4_778)
#: limits of a multiprocessor
REGISTERS, THREADS = 65_536, 2_048


class Usage(NamedTuple):
    """Resources of one kernel.

    Attributes:
        name: name of the kernel and its sizes.
        warps: warps per program.
        registers: registers per thread.
        stack: spilled bytes per thread.
    """

    name: str
    warps: int
    registers: int
    stack: int

    @property
    def occupancy(self) -> float:
        """Return the fraction of a multiprocessor's threads that are resident, ignoring shared memory."""
        program = 32 * self.warps
        return min(REGISTERS // (program * self.registers), THREADS // program) * program / THREADS


def usages(widths: tuple[int, ...] = WIDTHS) -> Iterator[Usage]:
    """Compile every kernel as in a bf16 training step, for 8,192 tokens."""
    import torch

    from lightning_sv.nn.kernels import gate_up, heads

    for rotates in (True, False):
        x = torch.empty(2, 4096, 28, 64, dtype=torch.bfloat16, device="meta")
        sizes = heads._sizes_of(x, x if rotates else None)
        name = "norm and rotation" if rotates else "norm"
        yield _usage(f"{name}, forward", heads._forward, sizes)
        yield _usage(f"{name}, backward", heads._backward, sizes | {"STEPS": heads.STEPS})
    for width in widths:
        sizes = gate_up._sizes_of(torch.empty(8192, width, dtype=torch.bfloat16, device="meta"))
        rows = -(-8192 // gate_up.PROGRAMS)
        yield _usage(f"norms and SwiGLU, {width:,} wide, forward", gate_up._forward, sizes)
        yield _usage(f"norms and SwiGLU, {width:,} wide, backward", gate_up._backward, sizes | {"ROWS": rows})


def _usage(name: str, kernel: Any, sizes: dict[str, Any]) -> Usage:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {key: value for key, value in sizes.items() if key != "num_warps"}
    types = {key: _type_of(key, constants) for key in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, key in enumerate(types) if types[key].startswith("*")}
    made = triton.compile(
        ASTSource(kernel, types, constants, attrs=aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": sizes["num_warps"]},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{key}:(\d+)", said)[1]) for key in ("REG", "STACK"))  # type: ignore[index]
    return Usage(name, sizes["num_warps"], registers, stack)


def _type_of(argument: str, constants: dict[str, Any]) -> str:
    """Return the Triton dtype: vectors, tables, 1/rms and partial sums in float32, other tensors in bf16."""
    if argument in constants:
        return "constexpr"
    if argument.endswith("_at"):
        return "*fp32" if argument.startswith(("gamma", "cos", "sin", "rrms", "parts")) else "*bf16"
    return "fp32" if argument == "eps" else "i32"


def main() -> None:
    print("| kernel | warps | registers | bytes of stack | threads of 2,048 |\n|---|---|---|---|---|")
    for usage in usages():
        print(f"| {usage.name} | {usage.warps} | {usage.registers} | {usage.stack} | {usage.occupancy:.2f} |")


if __name__ == "__main__":
    main()
