"""One training step: our Llama against Hugging Face's, and the strategies against `llama`.

    python -m benchmarks.step [--rounds 40] [--modes eager compiled] [--json FILE]

A step is forward, loss and backward on the same tokens, in float32 on the CPU (bf16 autocast on CUDA), all
candidates interleaved in one process. Reading shards is timed beside it.
"""

import json
import platform
import time
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.interleave import Ratio, measure
from lightning_sv import Backbone, BackboneConfig
from lightning_sv.interop.hf import hugging_face_config
from lightning_sv.nn import next_token_loss

CONFIG = BackboneConfig(name="bench", d_model=256, n_layer=4, n_head=4, vocab_size=4096)
BATCH, SEQ_LEN = 8, 256
STRATEGIES = ("llama", "hg", "hg+or", "hg+dp+or", "unified")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def step_of(model: torch.nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> Callable[[], None]:
    hugging_face = isinstance(model, LlamaForCausalLM)

    def step() -> None:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda"):
            if hugging_face:
                logits = model(tokens, use_cache=False).logits
                loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
            else:
                loss = next_token_loss(model(tokens), targets)
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = None
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    return step


def candidates(compiled: bool) -> dict[str, Callable[[], None]]:
    torch.manual_seed(0)
    block = torch.randint(0, CONFIG.vocab_size, (BATCH, SEQ_LEN + 1), device=DEVICE)
    models: dict[str, torch.nn.Module] = {"Hugging Face": LlamaForCausalLM(LlamaConfig(**hugging_face_config(CONFIG)))}
    models |= {name: Backbone(CONFIG, name) for name in STRATEGIES}
    steps = {}
    for name, model in models.items():
        model.to(DEVICE).train()
        if compiled:
            model.compile()
        steps[name] = step_of(model, block[:, :-1], block[:, 1:])
    return steps


def reading(folder: str, seq_len: int = 64, batch: int = 8) -> float:
    """Return tokens a second of reading a prepared corpus, batches made."""
    from lightning_sv.corpus import Share, TokenLoader, open_split

    loader = TokenLoader(open_split(folder, "train", seq_len=seq_len), Share(batch, batch))
    iterator = iter(loader)
    next(iterator)
    began, n = time.perf_counter(), 0
    while time.perf_counter() - began < 3:
        n += next(iterator)[:, 1:].numel()
    return n / (time.perf_counter() - began)


def show(console: Console, title: str, rows: list[Ratio], reference: str) -> None:
    table = Table(title=title, title_justify="left")
    for column in ("", "ms a step", f"time / {reference}", "95% interval"):
        table.add_column(column, justify="left" if not column else "right")
    for row in rows:
        interval = "" if row.name == reference else f"{row.low:.3f} to {row.high:.3f}"
        table.add_row(row.name, f"{row.milliseconds:.1f}", f"{row.ratio:.3f}", interval)
    console.print(table)


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--modes", nargs="+", default=["eager", "compiled"], choices=["eager", "compiled"])
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--data", default="data/stdlib")
    options = parser.parse_args()
    console, results = Console(), {}
    for mode in options.modes:
        torch.compiler.reset()
        steps = candidates(mode == "compiled")
        peers = measure({k: steps[k] for k in ("Hugging Face", "llama")}, "Hugging Face", rounds=options.rounds)
        own = measure({name: steps[name] for name in STRATEGIES}, "llama", rounds=options.rounds)
        show(console, f"{mode}: our Llama against Hugging Face's", peers, "Hugging Face")
        show(console, f"{mode}: strategies against llama", own, "llama")
        results[mode] = {"peers": [vars(r) for r in peers], "strategies": [vars(r) for r in own]}
    if Path(options.data, "manifest.json").exists():
        speed = reading(options.data)
        console.print(f"reading shards: {speed / 1e6:.2f} M tokens/s")
        results["reading_tokens_per_s"] = speed
    results["machine"] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "model": vars(CONFIG),
        "batch": [BATCH, SEQ_LEN],
    }
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
