"""Hessian-vector products relative to a training step, and products to 1% of lambda_max.

    python -m benchmarks.curvature [--rounds 20] [--json FILE]

Times are interleaved in one process, in float32, with the math kernel of SDPA unless stated
otherwise; a product uses the retained graph. Lanczos runs on initialized models and after a few
AdamW steps on one batch.
"""

import json
import platform
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.interleave import Ratio, measure, show
from benchmarks.memory import DEVICE
from lightning_sv import Backbone, BackboneConfig
from lightning_sv.curvature import HessianProduct, lanczos, twice_differentiable
from lightning_sv.nn import next_token_loss
from lightning_sv.scale import ScaleVector

TIMED = BackboneConfig(name="bench", d_model=128, n_layer=4, n_head=4, vocab_size=2048)
TIMED_BATCH = 4
TIMED_LEN = 128
SHARP = BackboneConfig(name="sharp", d_model=64, n_layer=2, n_head=2, vocab_size=256, init_std=0.08)
SHARP_BATCH = 4
SHARP_LEN = 64
SHARP_STEPS = 20
STRATEGIES = ("llama", "hg+dp+er", "unified")


def problem(model: Backbone, batch: int, length: int) -> Callable[[], torch.Tensor]:
    """Loss on a learnable text: most tokens are a fixed function of the previous token."""
    torch.manual_seed(0)
    vocab = model.config.vocab_size
    tokens = torch.randint(0, vocab, (batch, length + 1))
    follows = torch.randperm(vocab)
    for t in range(length):
        tokens[:, t + 1] = torch.where(
            torch.rand(batch) < 0.8, follows[tokens[:, t]], tokens[:, t + 1]
        )
    tokens = tokens.to(DEVICE)
    return lambda: next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])


def vectors_of(model: Backbone) -> list[torch.nn.Parameter]:
    found: list[torch.nn.Parameter] = []
    for module in model.modules():
        if isinstance(module, ScaleVector):
            found += module.parameters()
    return found


def wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def costs(strategy: str, rounds: int) -> list[Ratio]:
    model = Backbone(TIMED, strategy).to(DEVICE)
    loss = problem(model, TIMED_BATCH, TIMED_LEN)
    parameters = list(model.parameters())
    products = {
        "product, all parameters": HessianProduct(loss, parameters),
        "product, scale vectors": HessianProduct(loss, vectors_of(model)),
    }

    def backward() -> None:
        torch.autograd.grad(loss(), parameters)
        wait()

    def math_backward() -> None:
        with twice_differentiable():
            backward()

    def build() -> None:
        HessianProduct(loss, parameters)
        wait()

    def multiply(name: str) -> Callable[[], None]:
        product = products[name]
        probe = tuple(torch.randn_like(p) for p in product.parameters)

        def step() -> None:
            product(probe)
            wait()

        return step

    steps = {
        "forward + backward": math_backward,
        "the same, fused attention": backward,
        "the same, graph retained (once)": build,
    }
    return measure(
        steps | {name: multiply(name) for name in products}, "forward + backward", rounds=rounds
    )


def products_needed(strategy: str, trained: bool) -> dict[str, object]:
    model = Backbone(SHARP, strategy).to(DEVICE)
    loss = problem(model, SHARP_BATCH, SHARP_LEN)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(SHARP_STEPS if trained else 0):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    rows: dict[str, object] = {"loss": loss().item()}
    for name, subset in (
        ("all parameters", list(model.parameters())),
        ("scale vectors", vectors_of(model)),
    ):
        product = HessianProduct(loss, subset)
        true = lanczos(product, 80, rtol=0)
        counts = []
        off = []
        for seed in range(3):
            found = lanczos(product, 60, rtol=1e-2, generator=torch.Generator().manual_seed(seed))
            counts.append(found.n_matvecs)
            off.append(abs(found.value / true.value - 1))
        rows[name] = {
            "lambda_max": true.value,
            "error": true.error,
            "products": counts,
            "relative_error": off,
        }
    return rows


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    console = Console()
    results: dict[str, object] = {"costs": {}, "lanczos": {}}
    for strategy in STRATEGIES:
        rows = costs(strategy, options.rounds)
        show(console, f"{strategy}: Hessian-vector products", rows, "forward + backward")
        results["costs"][strategy] = [vars(row) for row in rows]
    for strategy in STRATEGIES:
        for trained in (False, True):
            key = f"{strategy}, {f'{SHARP_STEPS} steps' if trained else 'initial'}"
            results["lanczos"][key] = products_needed(strategy, trained)
            console.print(key, results["lanczos"][key])
    results["machine"] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name()
        if DEVICE.type == "cuda"
        else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "timed": vars(TIMED) | {"batch": [TIMED_BATCH, TIMED_LEN]},
        "sharp": vars(SHARP) | {"batch": [SHARP_BATCH, SHARP_LEN]},
    }
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
