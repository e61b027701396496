"""Bytes that one forward and backward pass moves on an H200, by strategy: from Inductor's kernels, without a GPU.

    python -m benchmarks.cuda_bytes [--models llama-1b] [--strategies llama unified] [--kernels] [--json FILE]

The module is the one that `fit` builds from conf/ with TRAINER=gpu; its training step and backward run on fake tensors
(`fake_cuda`), as in the first micro-batch of a step. Counted are

* the kernels that Inductor generates: what each says it moves, every buffer that it touches once (a reduction that
  goes over its input twice may read it twice);
* eager operations between compiled regions: the tensors they read and write, views and tables read by index aside.

Not counted, and the same for all strategies: matrix products and attention (their number is given), the sum of
gradients over micro-batches, the optimizer. Padding of matrix products, which Inductor decides by timing, is left out.
Bytes are exact for this code and this torch; milliseconds are a model, bytes / 3.75 TB/s, and not a measurement.
"""

import itertools
import json
from argparse import ArgumentParser
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.byte_count import Count, EagerBytes, add_program, extrapolated, kept
from benchmarks.fake_cuda import H200, recorded, usable
from lightning_sv.lit.module import PretrainModule
from lightning_sv.nn.cross_entropy import CHUNK
from lightning_sv.scale.row_chunks import unchunked
from lightning_sv.settings.parse import parse_run

ROOT = Path(__file__).parent.parent
MODELS = ("llama-1b", "llama-0.12b")
STRATEGIES = ("llama", "hg", "hg+dp+or", "unified")
TOKENS = 8_192  # a micro-batch
#: what an H200's memory delivers of its 4.8 TB/s to kernels like these: an assumption
BYTES_PER_S = 3.75e12


def arguments(model: str, strategy: str, layers: int | None = None, more: Sequence[str] = ()) -> list[str]:
    """Return what `make train TRAINER=gpu` gives to fit, with so many layers or the model's own, and `more`."""
    files = ["base", "optim/adamw", "schedule/cos", "trainer/gpu", "data/stdlib", f"model/{model}"]
    configs = [word for name in files for word in ("--config", str(ROOT / f"conf/{name}.yaml"))]
    depth = [] if layers is None else ["--model.backbone.n_layer", str(layers)]
    return [*configs, "--model.scale", strategy, *depth, *more]


def depth_of(model: str, strategy: str) -> int:
    """Return the layers of a model.

    Raises:
        ValueError: no such model or strategy, or a mixture of experts, whose loads need a trainer.
    """
    config = parse_run(arguments(model, strategy), check_corpus=False)[0].config
    if config.n_expert:
        raise ValueError(f"{model} is a mixture of experts; only dense models are counted.")
    return config.n_layer


def passes(model: str, strategy: str, layers: list[int], more: Sequence[str] = ()) -> list[Count]:
    """Count a forward and backward pass of the first micro-batch, for each number of layers."""
    counts = []
    with recorded() as programs, unchunked(CHUNK), patch("lightning_sv.nn.kernels.select.unusable", lambda: None):
        for n in layers:
            count = Count()
            run, data, trainer = parse_run(arguments(model, strategy, n, more), check_corpus=False)
            if trainer["precision"] != "bf16-mixed":
                raise ValueError(f"conf/trainer/gpu.yaml: precision {trainer['precision']} is not bf16-mixed.")
            module = PretrainModule(
                run.config,
                str(run.strategy),
                optim=run.optim,
                compile=run.compile,
                activation_checkpointing=run.activation_checkpointing,
                residual=run.residual,
                kernels=run.kernels,
            )
            with torch.device("meta"):
                module.configure_model()
                module._monitored = True  # nothing to log to
            for program in programs:
                program.calls = 0
            with EagerBytes(count):
                net = module.net.to_empty(device="cpu")
                block = torch.empty(TOKENS // data.seq_len, data.seq_len + 1, dtype=torch.long)
                with torch.autocast("cpu", torch.bfloat16), kept(count, list(net.parameters())):
                    loss = module.training_step(block, 0)["loss"]
                loss.backward()
            for i, program in enumerate(programs):
                add_program(count, f"graph {i}", program.source, program.calls, program.operators)
            counts.append(count)
    return counts


def show_kernels(console: Console, title: str, count: Count) -> None:
    table = Table(title=title, title_justify="left")
    for column in ("GB", "runs", "kernel or operation"):
        table.add_column(column, justify="right" if column != "kernel or operation" else "left", overflow="fold")
    moved = count.generated + count.eager
    for name, gigabytes in moved.most_common():
        table.add_row(f"{gigabytes:.4f}", str(count.launches[name]), name)
    for name, runs in count.products.most_common():
        table.add_row("", str(runs), name)
    console.print(table)


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS, help="dense models of conf/model")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES, help="the first is what the others are over")
    parser.add_argument("--args", default="", help="further arguments of fit: --args='--model.residual narrow'")
    parser.add_argument("--kernels", action="store_true", help="each kernel of a pass with two layers")
    parser.add_argument("--against", default=ROOT / "benchmarks/results/cuda_bytes.json", help="recorded before")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    if reason := usable():
        parser.exit(2, f"{reason} make bench-bytes makes an environment for it.\n")
    try:
        depth = {key: depth_of(*key) for key in itertools.product(options.models, options.strategies)}
    except ValueError as error:
        parser.exit(2, f"{error}\n")
    console, rows = Console(), []
    before = recorded_rows(Path(options.against))
    with Progress(transient=True, console=console) as progress:
        for (model, strategy), layers in progress.track(depth.items(), description="compiling"):
            counts = passes(model, strategy, [2, 3, 4], options.args.split())
            total, layer = extrapolated(counts, layers)
            moved = total["generated_gb"] + total["eager_gb"]
            rows.append(
                {
                    "model": model,
                    "strategy": strategy,
                    "layers": layers,
                    "gigabytes": round(moved, 6),
                    **{key: round(value, 6) for key, value in total.items()},
                    "layer_gigabytes": round(layer["generated_gb"] + layer["eager_gb"], 6),
                    "layer_saved_mib": round(layer["saved_mib"], 6),
                    "modelled_ms": round(1e3 * moved * 1e9 / BYTES_PER_S, 3),
                }
            )
            if options.kernels:
                show_kernels(console, f"{model}, {strategy}: a pass with two layers", counts[0])
    for row in rows:
        reference = next(r for r in rows if r["model"] == row["model"])
        row["ratio"] = round(row["gigabytes"] / reference["gigabytes"], 6)
    show(console, rows, before)
    if options.json:
        import triton

        machine = {
            "date": date.today().isoformat(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "card": f"{H200.name}, described to the compiler; nothing ran on one",
            "tokens": TOKENS,
            "arguments": options.args,
            "bytes_per_s_of_the_model": BYTES_PER_S,
        }
        Path(options.json).write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")


def recorded_rows(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return what was recorded, by model and strategy; nothing where nothing was."""
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return {(row["model"], row["strategy"]): row for row in rows}


def show(console: Console, rows: list[dict[str, Any]], before: dict[tuple[str, str], dict[str, Any]]) -> None:
    table = Table(title=f"a forward and backward pass over {TOKENS:,} tokens on an H200", title_justify="left")
    columns = ("GB", "over recorded", "ratio", "model's ms", "GB a layer", "MiB kept a layer", "generated", "eager")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        old = before.get((row["model"], row["strategy"]))
        table.add_row(
            f"{row['model']}, {row['strategy']}",
            f"{row['gigabytes']:.2f}",
            f"{row['gigabytes'] - old['gigabytes']:+.2f}" if old else "",
            f"{row['ratio']:.3f}",
            f"{row['modelled_ms']:.1f}",
            f"{row['layer_gigabytes']:.2f}",
            f"{row['layer_saved_mib']:.0f}",
            f"{row['generated_kernels']:.0f}",
            f"{row['eager_kernels']:.0f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
