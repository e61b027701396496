"""Stage 1: versions, the GPU, and its limits: copies, products, attention."""

import contextlib
import platform
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.clock import Clock, clock_of, median_ms
from benchmarks.gpu.process import Task

PACKAGES = (
    "torch", "triton", "numpy", "lightning", "pytorch-lightning", "transformers", "litdata", "jsonargparse",
    "omegaconf", "torchmetrics", "tokenizers", "liger-kernel", "litgpt", "torchtitan", "nvidia-cudnn-cu13",
    "nvidia-cublas",
)  # fmt: skip
#: (d_model, d_ff) of 0.12B, and of 1B unchanged and padded to multiples of 8, 16 and 64
FFN = ((768, 2048), (1792, 4778), (1792, 4784), (1792, 4800), (1792, 4864))
HEADS = ((768, 50304), (1792, 50304))
#: batch, heads, length, width of a head
ATTENTION = ((2, 28, 4096, 64), (8, 12, 1024, 64))
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def run(task: Task) -> dict[str, Any]:
    """Measure, and save after each kind of result."""
    clock = clock_of(task.device)
    found = dict[str, Any]()
    found["versions"] = versions(clock)
    task.save(found)
    parts: dict[str, Callable[[Clock, bool], Any]] = {
        "copy_tb_s": copy_tb_s,
        "bf16_tflops": square_tflops,
    }
    parts |= {"products": products, "attention": attention}
    for name, part in parts.items():
        with _noted(found, name):
            found[name] = part(clock, task.toy)
        clock.free()
        task.save(found)
    return found


@contextlib.contextmanager
def _noted(found: dict[str, Any], name: str) -> Any:
    """Record failures, and continue."""
    try:
        yield
    except Exception as error:
        found.setdefault("errors", {})[name] = (
            f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        )


def versions(clock: Clock) -> dict[str, Any]:
    """Return Python, packages (null: missing), the GPU and its driver."""
    installed: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed[name] = None
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "packages": installed,
        "device": clock.name(),
    }
    found["memory_gib"] = round(clock.total_bytes() / 2**30, 1)
    if clock.device.type == "cuda":
        properties = torch.cuda.get_device_properties(clock.device)
        found |= {
            "capability": f"{properties.major}.{properties.minor}",
            "sms": properties.multi_processor_count,
        }
        found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return found


def copy_tb_s(clock: Clock, toy: bool) -> float:
    """Return the bandwidth of a copy on the device, read and written, in TB/s."""
    n = (1 << 20) if toy else (4 << 30)
    source, target = (torch.empty(n, dtype=torch.uint8, device=clock.device) for _ in range(2))
    source.random_()
    return round(2 * n / median_ms(clock, lambda: target.copy_(source)) / 1e9, 4)


def square_tflops(clock: Clock, toy: bool) -> float:
    """Return the TFLOP/s of an n x n x n product in bf16 on random data (zeros are faster)."""
    n = 64 if toy else 8192
    a, b = (torch.randn(n, n, device=clock.device, dtype=torch.bfloat16) for _ in range(2))
    return round(2 * n**3 / median_ms(clock, lambda: a @ b, rounds=5) / 1e9, 1)


def products(clock: Clock, toy: bool) -> list[dict[str, Any]]:
    """Return TFLOP/s of y = x W^T, dx = dy W, dW = dy^T x with 8,192 tokens, in our shapes."""
    rows = []
    n = 32 if toy else 8192
    square = [(d, d) for d in (768, 1792)]
    for d_in, d_out in ((8, 16), (16, 21)) if toy else (*square, *FFN, *HEADS):
        x, w, dy = (_normal(clock, *shape) for shape in ((n, d_in), (d_out, d_in), (n, d_out)))
        calls: dict[str, Callable[[], Tensor]] = {
            "forward": lambda x=x, w=w: x @ w.T,  # type: ignore[misc]
            "d_input": lambda w=w, dy=dy: dy @ w,  # type: ignore[misc]
            "d_weight": lambda x=x, dy=dy: dy.T @ x,  # type: ignore[misc]
        }
        row: dict[str, Any] = {"tokens": n, "d_in": d_in, "d_out": d_out}
        row |= {
            key: round(2 * n * d_in * d_out / median_ms(clock, call) / 1e9, 1)
            for key, call in calls.items()
        }
        rows.append(row)
    return rows


def attention(clock: Clock, toy: bool) -> list[dict[str, Any]]:
    """Return milliseconds of causal bf16 attention; FLOPs count the causal half."""
    rows = []
    for shape in ((1, 2, 16, 8),) if toy else ATTENTION:
        b, h, t, k = shape
        q, key, v = (_normal(clock, *shape).requires_grad_() for _ in range(3))
        dy = _normal(clock, *shape)
        for name, backend in BACKENDS.items():
            row: dict[str, Any] = {"shape": list(shape), "backend": name}

            def forward(
                q: Tensor = q, key: Tensor = key, v: Tensor = v, backend: SDPBackend = backend
            ) -> Tensor:
                with sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(q, key, v, is_causal=True)

            def both(
                dy: Tensor = dy, forward: Callable[[], Tensor] = forward, inputs: Any = (q, key, v)
            ) -> None:
                torch.autograd.grad(forward(), inputs, dy)

            with _noted(row, "error"):
                row["forward_ms"] = round(median_ms(clock, forward), 4)
                row["both_ms"] = round(median_ms(clock, both), 4)
                row["both_tflops"] = round(
                    7 * b * h * t * t * k / row["both_ms"] / 1e9, 1
                )  # 2 + 5 products, half
            rows.append(row)
    return rows


def _normal(clock: Clock, *shape: int) -> Tensor:
    return torch.randn(*shape, device=clock.device, dtype=torch.bfloat16)
